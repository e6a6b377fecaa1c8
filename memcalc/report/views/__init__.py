"""Results as views: sections of plain data that the web page and the HTML report draw with the same script."""
