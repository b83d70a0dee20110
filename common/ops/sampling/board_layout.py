"""How proposals are laid out where a step takes them when it begins; see `engine/board.py`."""

LINES = 16
"""Lines of a slot: a proposal, and what a draft worker would propose instead behind likely outcomes."""
LINE_TOKENS = 16
BOARD_WORDS = 1 + LINES + LINES * LINE_TOKENS
"""Words of a slot, int32: the tokens of the text before its lines, the length of each line, then their tokens. A negative
length: a head drafts no further there, since a logit was not finite."""
TAKEN_HEADER = 3
TAKEN_WORDS = TAKEN_HEADER + LINE_TOKENS
"""Words that tell what a row has taken: tokens that it verifies, tokens that there were, whether a line ended since a logit was
not finite, then the tokens."""
