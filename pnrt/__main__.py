"""`python -m pnrt`."""

from pnrt.cli import main

main()
