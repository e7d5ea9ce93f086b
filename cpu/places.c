/* The Python module superadam.kernels._places: where tensors lie in memory, for a whole list in one call.
 *
 * torch fills a DLTensor for a tensor without allocating anything, by a function that the capsule
 * `torch.Tensor.__dlpack_c_exchange_api__` holds: the C exchange API of DLPack 1.3. The storage and the version counter
 * come from Python's objects. Nothing here keeps a reference. */

#include <Python.h>
#include <stdint.h>

/* As https://github.com/dmlc/dlpack defines them. */
typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct {
    uint32_t major, minor;
    void *previous;
    void *allocate, *from_object, *to_object;
    int (*view)(void *object, dl_tensor *tensor);
    void *current_stream;
} dl_exchange;

enum { ADDRESS, STORAGE, BYTES, LAYOUT, VERSION, WORDS };

static const dl_exchange *exchange;
static PyObject *storage_of, *bytes_of, *key_name, *version_name;

/* One to one in either argument, so that layouts which differ in a single number have different hashes. */
static uint64_t mixed(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x9E3779B97F4A7C15u; }

/* Returns the number that a call or an attribute gave, and releases it; -1 where it gave none. */
static int64_t number_of(PyObject *result)
{
    int64_t number = -1;
    if (result) {
        number = PyLong_AsLongLong(result);
        Py_DECREF(result);
    }
    PyErr_Clear();
    return number;
}

static void describe(PyObject *tensor, int64_t *place)
{
    dl_tensor view;
    for (int word = 0; word < WORDS; word++)
        place[word] = 0;
    if (tensor == Py_None)
        return;
    if (exchange->view(tensor, &view) == 0) {
        uint64_t layout = mixed(mixed(mixed(view.code, view.bits), view.device_type), view.device_id);
        for (int32_t dim = 0; dim < view.ndim; dim++)
            layout = mixed(mixed(layout, (uint64_t)view.shape[dim]), (uint64_t)view.strides[dim]);
        place[ADDRESS] = (int64_t)((uintptr_t)view.data + view.byte_offset);
        place[LAYOUT] = (int64_t)mixed(layout, (uint64_t)view.ndim);
    } else {
        PyErr_Clear(); /* it has no memory, as on the meta device */
    }
    PyObject *storage = PyObject_CallFunctionObjArgs(storage_of, tensor, NULL);
    if (storage) {
        place[STORAGE] = number_of(PyObject_GetAttr(storage, key_name));
        place[BYTES] = number_of(PyObject_CallFunctionObjArgs(bytes_of, storage, NULL));
        Py_DECREF(storage);
    } else {
        PyErr_Clear();
    }
    place[VERSION] = number_of(PyObject_GetAttr(tensor, version_name));
}

static PyObject *use(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *capsule, *objects[4];
    if (!PyArg_ParseTuple(arguments, "OOOOO", &capsule, &objects[0], &objects[1], &objects[2], &objects[3]))
        return NULL;
    const dl_exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!found)
        return NULL;
    if (found->major != 1 || !found->view) {
        PyErr_SetString(PyExc_ValueError, "the exchange API is not that of DLPack 1");
        return NULL;
    }
    exchange = found;
    storage_of = Py_NewRef(objects[0]);
    bytes_of = Py_NewRef(objects[1]);
    key_name = Py_NewRef(objects[2]);
    version_name = Py_NewRef(objects[3]);
    Py_RETURN_NONE;
}

static PyObject *look(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *tensors;
    Py_buffer buffer;
    if (!PyArg_ParseTuple(arguments, "O!w*", &PyList_Type, &tensors, &buffer))
        return NULL;
    int64_t *places = buffer.buf;
    const Py_ssize_t count = PyList_Size(tensors);
    PyObject *result = NULL;
    if (!exchange || buffer.len != count * (Py_ssize_t)(WORDS * sizeof *places)) {
        PyErr_SetString(PyExc_ValueError, "the array does not have one place for each tensor");
    } else {
        result = Py_NewRef(Py_None);
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *tensor = Py_XNewRef(PyList_GetItem(tensors, i));
            if (!tensor) { /* a tensor's own methods have shortened the list meanwhile */
                Py_CLEAR(result);
                break;
            }
            describe(tensor, places + WORDS * i);
            Py_DECREF(tensor);
        }
    }
    PyBuffer_Release(&buffer);
    return result;
}

static PyMethodDef functions[] = {
    {"use", use, METH_VARARGS, "Take the exchange API, what returns a storage and its bytes, and names of attributes."},
    {"look", look, METH_VARARGS, "Write the places of a list of tensors, or None, into an array of int64."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_places", NULL, -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__places(void) { return PyModule_Create(&definition); }
