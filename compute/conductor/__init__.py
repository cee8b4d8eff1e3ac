"""The long-lived conductor: step loop, ledger, micro-batcher, publisher, and its HTTP service."""
