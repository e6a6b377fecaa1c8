"""The web page: the functions that its worker calls, its form, and the files that a browser loads."""
