r"""Makes keras2_3.json: Adagrad of Keras 2.3.1 on TensorFlow 1.15.5.

With Python 3.7, from the repository's root:

    pip install "h5py<3" "keras==2.3.1" \
        "tensorflow==1.15.5" "protobuf<3.21" "numpy<1.19"
    python tests/golden/make_keras2_3.py
"""

import _keras2
import keras
import tensorflow as tf

if __name__ == "__main__":
    _keras2.write(__file__, tf, keras, "keras.optimizers.Adagrad", "global_clipnorm")
