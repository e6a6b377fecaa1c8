"""The web page: what its worker asks of memcalc, its form, and the files that a browser loads."""
