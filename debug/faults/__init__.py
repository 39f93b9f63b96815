"""The fault campaign: faults are planted in real training, and what becomes of them is judged bit
for bit.
"""
