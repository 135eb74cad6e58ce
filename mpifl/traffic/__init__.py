"""Traffic of a real federation: message sizes, compression, privacy and the ledger."""
