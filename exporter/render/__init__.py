"""Results as documents: plots as SVG, templates of pages."""
