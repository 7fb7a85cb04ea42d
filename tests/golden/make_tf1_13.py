"""Makes tf1_13.json: Adagrad of tf.keras in TensorFlow 1.13.2.

With Python 3.6, from the repository's root:

    pip install "tensorflow==1.13.2" "protobuf<3.20" "numpy<1.17"
    python tests/golden/make_tf1_13.py
"""

import _keras2
import tensorflow as tf

if __name__ == "__main__":
    _keras2.write(__file__, tf, tf.keras, "tf.keras.optimizers.Adagrad", "clipnorm")
