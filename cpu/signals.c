/* The Python module superadam.host._signals: sections of the main thread inside which no handler of a signal runs.
 *
 * For that time a note stands for each Python handler. It raises nothing, so that a section that has begun gets to its
 * end. Beginning and end are one call into C each: in there handlers run only inside PyErr_CheckSignals(), which
 * signal.signal(), too, calls before it changes anything. What they raise is a result, after which the work goes on. A
 * handler may enter sections of its own, set handlers, and let other threads run, which may fork: whatever that changes
 * is read again afterwards. What the system does at a signal stays as it is: CPython's function marks it and writes to
 * the wakeup fd, once. */

#include <Python.h>
#include <signal.h>

enum { TRIES = 100 }; /* more than there are signals */

static PyObject *getsignal, *setsignal; /* those of Python's module signal, but in C */
static PyObject *numbers[_NSIG];
static PyObject *notes[_NSIG]; /* each with a list, empty until its section has ended, then of the handler that ... */
static PyObject *replaced[_NSIG]; /* ... it stands for: a program that has found it inside may call or set it later */
static PyObject *due;             /* a list of arguments: of the handlers that are to run at the end */
static Py_ssize_t earlier;        /* of those, how many a section that is being left is still to call */
static int depth;                 /* of sections inside one another, of which the outermost counts */
static unsigned ended;            /* sections */
static int paused, collects; /* sections of all threads; whether the garbage collector goes on after the last one */

/* Makes the present exception the one to raise at the end; the one before becomes its context, as in Python. */
static void keep_error(PyObject **error)
{
    PyObject *type, *traceback;
    PyObject *before = *error;
    PyErr_Fetch(&type, error, &traceback);
    PyErr_NormalizeException(&type, error, &traceback);
    if (traceback)
        PyException_SetTraceback(*error, traceback);
    PyErr_SetHandledException(*error);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    Py_XDECREF(before);
}

/* Calls what is due, also after one of them has raised: CPython 3.11 would wait with the others for another signal. */
static void call_pending(PyObject **error)
{
    for (int i = 0; i < TRIES && PyErr_CheckSignals() < 0; i++)
        keep_error(error);
}

static PyObject *add_to_due(PyObject *former, PyObject *arguments)
{
    if (PyList_Size(former))
        return PyObject_CallObject(PyList_GetItem(former, 0), arguments);
    return PyList_Append(due, arguments) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef note_method = {"note", add_to_due, METH_VARARGS, "Let a handler be called at the end."};

/* Sets a Python handler where the present one is `from`, or, without these, a note for any function. Returns the one
 * before. */
static PyObject *replace(int number, PyObject *from, PyObject *to, PyObject **error)
{
    for (int i = 0; i < TRIES; i++) {
        struct sigaction action;
        call_pending(error);
        PyObject *present = PyObject_CallFunctionObjArgs(getsignal, numbers[number], NULL);
        if (present && (from ? present != from : !PyCallable_Check(present))) {
            Py_DECREF(present);
            return NULL;
        }
        sigaction(number, NULL, &action);
        PyObject *former = to ? NULL : PyList_New(0);
        PyObject *next = to ? Py_NewRef(to) : former ? PyCFunction_New(&note_method, former) : NULL;
        PyObject *before = present && next ? PyObject_CallFunction(setsignal, "iO", number, next) : NULL;
        if (before && before == present && PyCallable_Check(next))
            sigaction(number, &action, NULL); /* also what signal.siginterrupt() and faulthandler.register() have set */
        if (before && !to)
            notes[number] = Py_NewRef(next);
        Py_XDECREF(former);
        Py_XDECREF(next);
        Py_XDECREF(present);
        if (before)
            return before;
        keep_error(error);
    }
    return NULL;
}

static PyObject *pause_collector(PyObject *self, PyObject *begins)
{
    (void)self;
    if (!paused)
        collects = PyGC_Disable();
    paused += begins == Py_True ? 1 : -(paused > 0);
    if (!paused && collects)
        PyGC_Enable();
    return PyLong_FromLong(paused);
}

/* Puts handlers back, calls those that are due, and raises what any of them has raised; `error` was raised before. */
static PyObject *leave(PyObject *error, PyObject *handled)
{
    const Py_ssize_t first = earlier; /* a handler, or what it lets go of, may enter a section of its own */
    depth = 0;
    ended++;
    for (int number = 1; number < _NSIG; number++) {
        if (!replaced[number])
            continue;
        PyObject *handler = Py_NewRef(replaced[number]), *note = Py_NewRef(notes[number]);
        PyObject *before = replace(number, note, handler, &error); /* unless the section has set another one */
        if (before && before != note)                              /* a handler has set this one, in between */
            Py_XDECREF(replace(number, handler, before, &error));
        Py_XDECREF(before);
        if (PyList_Append(PyCFunction_GetSelf(note), handler) < 0)
            keep_error(&error);
        Py_DECREF(note);
        Py_DECREF(handler);
        Py_CLEAR(notes[number]);
        Py_CLEAR(replaced[number]);
    }
    Py_XDECREF(pause_collector(NULL, Py_False));
    while (PyList_Size(due) > first) {
        PyObject *arguments = Py_NewRef(PyList_GetItem(due, first));
        PyList_SetSlice(due, first, first + 1, NULL);
        PyObject *number = PyTuple_GetItem(arguments, 0);
        PyObject *handler = PyObject_CallFunctionObjArgs(getsignal, number, NULL); /* as set by now */
        PyObject *result = handler && PyCallable_Check(handler) ? PyObject_CallObject(handler, arguments) : NULL;
        if (PyErr_Occurred())
            keep_error(&error);
        else if (!result)
            raise((int)PyLong_AsLong(number));
        Py_XDECREF(result);
        Py_XDECREF(handler);
        Py_DECREF(arguments);
    }
    if (error) {
        PyErr_SetHandledException(handled);
        PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error, PyException_GetTraceback(error));
    }
    Py_XDECREF(handled);
    return error ? NULL : Py_NewRef(Py_None);
}

static PyObject *enter(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    if (depth == 0) {
        const Py_ssize_t size = PyList_Size(due);
        PyObject *error = NULL, *handled = PyErr_GetHandledException();
        unsigned before = ended - 1;
        Py_XDECREF(pause_collector(NULL, Py_True));
        while (before != ended && !error) { /* again where a handler's own section has put all back */
            before = ended;
            for (int number = 1; number < _NSIG && !error; number++)
                if (!replaced[number])
                    replaced[number] = replace(number, NULL, NULL, &error);
        }
        earlier = size;
        if (error)
            return leave(error, handled);
        Py_XDECREF(handled);
    }
    depth++;
    Py_RETURN_NONE;
}

static PyObject *leave_one(PyObject *self, PyObject *raised)
{
    (void)self, (void)raised;
    if (depth == 1)
        return leave(NULL, PyErr_GetHandledException());
    if (depth) /* 0 in a child that was forked inside */
        depth--;
    Py_RETURN_NONE;
}

static PyObject *forget(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    PyList_SetSlice(due, 0, PyList_Size(due), NULL);
    return leave(NULL, PyErr_GetHandledException());
}

static PyMethodDef section_methods[] = {
    {"__enter__", enter, METH_NOARGS, "Begin; nothing has begun where a handler that was due before raises."},
    {"__exit__", leave_one, METH_VARARGS, "End; then call the handlers that are due, and raise what they raise."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot section_slots[] = {
    {Py_tp_doc, "A context of the main thread in which no handler of a signal runs; may be entered again inside."},
    {Py_tp_methods, section_methods},
    {0, NULL},
};

static PyType_Spec section_spec = {
    "superadam.host._signals.Section", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, section_slots,
};

static PyMethodDef functions[] = {
    {"pause_collector", pause_collector, METH_O, "Begin or end a section of any thread; return how many there are."},
    {"forget", forget, METH_NOARGS, "End all sections, without the signals that came inside: in a forked child."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_signals", NULL, -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__signals(void)
{
    PyObject *module = PyModule_Create(&definition), *section = PyType_FromSpec(&section_spec);
    PyObject *signals = PyImport_ImportModule("_signal");
    if (!module || !section || !signals || PyModule_AddObjectRef(module, "Section", section) < 0)
        return NULL;
    getsignal = PyObject_GetAttrString(signals, "getsignal");
    setsignal = PyObject_GetAttrString(signals, "signal");
    due = PyList_New(0);
    for (int number = 0; number < _NSIG; number++)
        if (!(numbers[number] = PyLong_FromLong(number)))
            return NULL;
    Py_DECREF(section);
    Py_DECREF(signals);
    return getsignal && setsignal && due ? module : NULL;
}
