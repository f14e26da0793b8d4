"""OpenRLHF under Nereus: ``python -m nereus_plugins.openrlhf --nereus.enable <OpenRLHF flags>``.

The launcher takes the ``--nereus.*`` flags away, checks the seams, wraps one method of the two
trainer classes and then runs OpenRLHF's own `openrlhf.cli.train_ppo_ray` with the flags that are
left. Importing this package imports no OpenRLHF.
"""
