"""Faults planted in real training; what becomes of them is judged bit for bit."""
