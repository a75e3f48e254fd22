"""The report of a build: `report.json` is the truth; the page, Markdown and JUnit XML are its renderings."""
