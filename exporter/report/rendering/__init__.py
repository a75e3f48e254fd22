"""A report as text, page, Markdown and JUnit."""
