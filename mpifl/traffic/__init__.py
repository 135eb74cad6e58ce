"""Traffic of a real federation: message sizes, compression and the ledger."""
