"""The forward pass of each implementation's modules, as operators on a tape."""
