"""What JAX and its compilers need: versions, forms for a platform, jaxprs.

- ``versions``: names that JAX changes from one version to the next.
- ``compilers``: other forms of an operation for CPU, GPU or TPU, as barriers.
- ``jaxprs``: reads jaxprs, evaluates one by a rule for its equations.
"""
