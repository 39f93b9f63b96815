"""Text out of an attached model: teacher and student as models of their own, and what is decoded
from them.
"""
