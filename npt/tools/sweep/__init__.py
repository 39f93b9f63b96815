"""Studies: many short runs on one base, to see what keeps training stable,
shared by any number of workers.
"""
