"""What a run costs in arithmetic and memory, before it is run and while it runs."""
