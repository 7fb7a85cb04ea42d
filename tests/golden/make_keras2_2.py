r"""Makes keras2_2.json: Adagrad of Keras 2.2.4 on TensorFlow 1.13.2.

With Python 3.6, from the repository's root:

    pip install "h5py<3" "keras==2.2.4" \
        "tensorflow==1.13.2" "protobuf<3.20" "numpy<1.17"
    python tests/golden/make_keras2_2.py
"""

import _keras2
import keras
import tensorflow as tf

if __name__ == "__main__":
    _keras2.write(__file__, tf, keras, "keras.optimizers.Adagrad", "global_clipnorm")
