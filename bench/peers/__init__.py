"""What other stacks do for the same op, written down as small functions to time beside ours."""
