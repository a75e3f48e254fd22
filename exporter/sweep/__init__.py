"""`effexport sweep`: many builds, on this machine or on many."""
