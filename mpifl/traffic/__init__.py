"""What a real federation would send: sizes, compression and the ledger."""
