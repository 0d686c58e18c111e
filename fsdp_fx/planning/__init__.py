"""What passes, printing and pictures ask about a program: here, its memory curve.

Nothing in this package changes a program.
"""
