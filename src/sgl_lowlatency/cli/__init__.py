"""The `sgl-lowlatency` command: one module per subcommand."""
