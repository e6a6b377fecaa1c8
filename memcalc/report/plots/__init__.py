"""Pictures of a run's memory over time: in the terminal, as PNG and SVG, and as a page to look around in."""
