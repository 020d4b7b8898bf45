"""What stops an interpreted kernel."""


class UnknownInstruction(NotImplementedError):
    """An instruction, an operand or a modifier that the interpreter has no entry for; the text names it."""


class Fault(RuntimeError):
    """The kernel did what a GPU would stop it for, or never ends."""


class MemoryFault(Fault):
    """An access outside every allocation, or outside the workgroup's LDS."""


class Trap(Fault):
    """s_trap: the kernel stopped itself, and with it the launch of its GPU. Stores that were not waited for are lost."""

    def __init__(self, message: str, gpu: int):
        super().__init__(message)
        self.gpu = gpu


class BudgetSpent(Fault):
    """More instructions than the caller allows: most often a wait that never ends."""
