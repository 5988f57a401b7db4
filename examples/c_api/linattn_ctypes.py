import ctypes, sys

lib = ctypes.CDLL(sys.argv[1])
lib.linattn_last_error.restype = ctypes.c_char_p

class options(ctypes.Structure):
    _fields_ = [("map", ctypes.c_char_p), ("rule", ctypes.c_char_p), ("head_dim", ctypes.c_int64),
                ("value_dim", ctypes.c_int64), ("heads", ctypes.c_int64), ("query_scale", ctypes.c_double)]

def check(status):
    if status != 0:
        raise ValueError(lib.linattn_last_error().decode())

attn, state = ctypes.c_void_p(), ctypes.c_void_p()
check(lib.linattn_attention_create(ctypes.byref(options(head_dim=4, heads=2)), ctypes.byref(attn)))
check(lib.linattn_state_create(attn, ctypes.byref(state)))
token, out = (ctypes.c_float * 8)(*range(8)), (ctypes.c_float * 8)()
check(lib.linattn_step(state, token, token, token, None, None, out))
print("one token sees itself:", [round(x, 5) for x in out])
