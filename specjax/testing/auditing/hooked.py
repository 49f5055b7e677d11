"""x"""
def hooked_law(*a): raise NotImplementedError
