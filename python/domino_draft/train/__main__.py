"""`python -m domino_draft.train --target FOLDER --data FILE --output FOLDER ...`: train one arm."""

from .cli import main

main()
