"""The forward of each implementation's modules, written on a tape: what runs, hence what autograd keeps."""
