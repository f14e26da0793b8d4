"""What holds for every test: a slow machine is no reason to fail."""

from hypothesis import HealthCheck, settings

settings.register_profile("nereus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nereus")
