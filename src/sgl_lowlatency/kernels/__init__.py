"""One module per kernel: signature, shapes and dtypes. The only importers of the extension."""
