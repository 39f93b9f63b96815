"""Clean training runs in transformers' and TRL's Trainers, plain and guarded, compared."""
