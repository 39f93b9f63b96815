"""Teacher-student distillation: losses, strategies, the transaction, the loop."""
