/* The Python module superadam.kernels._places: where tensors lie in memory, for a whole list in one call.
 *
 * torch fills a DLTensor for a tensor without allocating anything, by a function that the capsule
 * `torch.Tensor.__dlpack_c_exchange_api__` holds: the C exchange API of DLPack 1.3. The storage, the version counter
 * and the gradient come from Python's objects. Nothing here keeps a reference. */

#include <Python.h>
#include <stdint.h>
#include <string.h>

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
static PyObject *tensor_type, *storage_of, *bytes_of, *is_negative, *key_name, *version_name, *gradient_name;

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

/* Writes where the memory of a tensor begins, and returns a hash of how it lies there; writes nothing, and returns 0,
 * where it has none. */
static int64_t see(PyObject *tensor, int64_t *address)
{
    dl_tensor view;
    if (exchange->view(tensor, &view) != 0) {
        PyErr_Clear(); /* as on the meta device */
        return 0;
    }
    uint64_t hash = mixed(mixed(mixed(view.code, view.bits), view.device_type), view.device_id);
    for (int32_t dim = 0; dim < view.ndim; dim++)
        hash = mixed(mixed(hash, (uint64_t)view.shape[dim]), (uint64_t)view.strides[dim]);
    *address = (int64_t)((uintptr_t)view.data + view.byte_offset);
    return (int64_t)mixed(hash, (uint64_t)view.ndim);
}

static void describe(PyObject *tensor, int64_t *place)
{
    memset(place, 0, WORDS * sizeof *place);
    if (tensor == Py_None)
        return;
    place[LAYOUT] = see(tensor, &place[ADDRESS]);
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
    PyObject *capsule, *objects;
    PyObject **const kept[] = {&tensor_type, &storage_of,   &bytes_of,     &is_negative,
                               &key_name,    &version_name, &gradient_name};
    enum { KEPT = sizeof kept / sizeof *kept };
    if (!PyArg_ParseTuple(arguments, "OO!", &capsule, &PyTuple_Type, &objects))
        return NULL;
    const dl_exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!found)
        return NULL;
    if (found->major != 1 || !found->view) {
        PyErr_SetString(PyExc_ValueError, "the exchange API is not that of DLPack 1");
        return NULL;
    }
    if (PyTuple_Size(objects) != KEPT) {
        PyErr_SetString(PyExc_ValueError, "a class, three methods and three names are expected");
        return NULL;
    }
    exchange = found;
    for (Py_ssize_t i = 0; i < KEPT; i++)
        *kept[i] = Py_NewRef(PyTuple_GetItem(objects, i));
    Py_RETURN_NONE;
}

/* Returns whether an array has this many numbers. */
static int has_room(const Py_buffer *array, Py_ssize_t numbers)
{
    const int has = exchange && array->len == numbers * (Py_ssize_t)sizeof(int64_t);
    if (!has)
        PyErr_SetString(PyExc_ValueError, "the arrays do not have one place for each tensor");
    return has;
}

static PyObject *look(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *tensors, *result = NULL;
    Py_buffer places;
    if (!PyArg_ParseTuple(arguments, "O!w*", &PyTuple_Type, &tensors, &places))
        return NULL;
    const Py_ssize_t count = PyTuple_Size(tensors);
    if (has_room(&places, WORDS * count)) {
        for (Py_ssize_t i = 0; i < count; i++)
            describe(PyTuple_GetItem(tensors, i), (int64_t *)places.buf + WORDS * i);
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&places);
    return result;
}

static PyObject *compare(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *tensors, *result = NULL;
    Py_ssize_t moved = 0, changed = 0;
    Py_buffer known, versions, rows;
    if (!PyArg_ParseTuple(arguments, "O!y*w*w*", &PyTuple_Type, &tensors, &known, &versions, &rows))
        return NULL;
    const Py_ssize_t count = PyTuple_Size(tensors);
    if (has_room(&known, WORDS * count) && has_room(&versions, count) && has_room(&rows, count)) {
        for (Py_ssize_t i = 0; i < count; i++) {
            const int64_t *before = (const int64_t *)known.buf + WORDS * i;
            int64_t place[WORDS];
            describe(PyTuple_GetItem(tensors, i), place);
            ((int64_t *)versions.buf)[i] = place[VERSION];
            changed += place[VERSION] != before[VERSION];
            if (memcmp(place, before, VERSION * sizeof *place) != 0)
                ((int64_t *)rows.buf)[moved++] = i;
        }
        result = Py_BuildValue("nn", moved, changed);
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&versions);
    PyBuffer_Release(&known);
    return result;
}

/* Returns where a gradient lies, if it is an ordinary tensor in this layout, whose elements are as they lie there. */
static int64_t address_of(PyObject *gradient, int64_t expected)
{
    int64_t address = 0;
    if ((PyObject *)Py_TYPE(gradient) != tensor_type || see(gradient, &address) != expected)
        return 0;
    PyObject *negative = PyObject_CallFunctionObjArgs(is_negative, gradient, NULL);
    const int is_plain = negative == Py_False;
    Py_XDECREF(negative);
    PyErr_Clear();
    return is_plain ? address : 0;
}

static PyObject *gradients(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *parameters;
    Py_buffer layouts, addresses;
    if (!PyArg_ParseTuple(arguments, "O!y*w*", &PyTuple_Type, &parameters, &layouts, &addresses))
        return NULL;
    const Py_ssize_t count = PyTuple_Size(parameters);
    PyObject *found = has_room(&layouts, count) && has_room(&addresses, count) ? PyList_New(count) : NULL;
    Py_ssize_t present = 0, plain = 0;
    for (Py_ssize_t i = 0; i < count && found; i++) {
        PyObject *gradient = PyObject_GetAttr(PyTuple_GetItem(parameters, i), gradient_name);
        int64_t *address = (int64_t *)addresses.buf + i;
        if (!gradient) {
            Py_CLEAR(found);
            break;
        }
        *address = gradient == Py_None ? 0 : address_of(gradient, ((const int64_t *)layouts.buf)[i]);
        present += gradient != Py_None;
        plain += *address != 0;
        PyList_SetItem(found, i, gradient);
    }
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&layouts);
    return found ? Py_BuildValue("Nnn", found, present, plain) : NULL;
}

static PyMethodDef functions[] = {
    {"use", use, METH_VARARGS,
     "Take the exchange API, and a tuple of torch's class and methods, and names of attributes."},
    {"look", look, METH_VARARGS, "Write the places of a tuple of tensors, or None, into an array of int64."},
    {"compare", compare, METH_VARARGS,
     "Compare the places of a tuple of tensors, or None, with those in an array; write their versions into another "
     "one, and into a third one the positions of those whose memory is another, or is seen in another layout; return "
     "how many those are, and how many versions are others."},
    {"gradients", gradients, METH_VARARGS,
     "Return the gradients of a tuple of parameters, how many are present, and how many lie as an array of layouts "
     "says; write the addresses of those into another one, and 0 for all others."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_places", NULL, -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__places(void) { return PyModule_Create(&definition); }
