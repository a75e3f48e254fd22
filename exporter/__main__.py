"""`python -m effexport`."""

from effexport.cli import main

main()
