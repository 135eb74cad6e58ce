"""What happens on a device: local training, losses, embeddings, evaluation."""
