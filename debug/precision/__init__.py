"""The comparison of number formats that debug/compare_precision.py prints."""
