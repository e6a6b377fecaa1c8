"""Tables that several screens, Markdown and HTML share."""
