"""Teacher-student distillation: losses, strategies."""
