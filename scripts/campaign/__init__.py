"""Attacks on effexport: damaged files, hostile operators and requests, full disks and kills. See docs/security.md."""
