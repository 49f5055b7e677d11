"""Flags of XLA for tests, whose programs are small and mostly run once."""

# The compiler's quickest ways: with its defaults, compiling takes four times as long.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": "false",
    "xla_cpu_parallel_codegen_split_count": 1,
}


def quick_flags(devices: int, given: str = "") -> str:
    """`XLA_FLAGS` with so many CPU devices; flags that are `given` stay."""
    flags = {"xla_force_host_platform_device_count": devices} | QUICK
    own = [f"--{name}={value}" for name, value in flags.items() if name not in given]
    return " ".join([given, *own]).strip()
