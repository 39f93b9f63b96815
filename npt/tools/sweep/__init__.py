"""Studies: many short runs on one base, each looked at for what keeps training stable, shared by as
many workers as there are.
"""
