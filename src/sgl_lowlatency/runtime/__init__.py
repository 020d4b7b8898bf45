"""The objects SGLang's contracts ask for, and what keeps them honest: state access, self-check, coverage, fault watch."""
