"""What each model needs from SGLang, declared in SGLang's own contract objects."""
