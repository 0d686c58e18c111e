"""The eager executor: module and autograd hooks that move the window's cursor."""
