package inbox

import (
	"container/list"
	"context"
	"sync"
	"time"
)

// deadlines gives out contexts that end after a timeout, the same for all. One timer serves all of them, and runs on
// between them: to start one for each message would have the Go scheduler wake a thread each time, only to wait for it.
type deadlines struct {
	timeout time.Duration

	mu      sync.Mutex
	pending list.List // of *deadlineContext, the first to end in front
	running bool      // the timer
}

// deadlineContext is what [context.WithTimeout] returns, but for the timer. A context derived from it is cancelled with it,
// with context.DeadlineExceeded as the cause.
type deadlineContext struct {
	context.Context
	cancel   context.CancelCauseFunc
	deadline time.Time
}

func (c *deadlineContext) Deadline() (time.Time, bool) { return c.deadline, true }
func (c *deadlineContext) Err() error                  { return context.Cause(c.Context) }

// begin returns a context that has the values of ctx, but does not end with it. Its cancel function has to be called.
func (d *deadlines) begin(ctx context.Context) (context.Context, context.CancelFunc) {
	inner, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	c := &deadlineContext{Context: inner, cancel: cancel}

	d.mu.Lock()
	defer d.mu.Unlock()
	c.deadline = time.Now().Add(d.timeout)
	element := d.pending.PushBack(c)
	if !d.running {
		d.running = true
		time.AfterFunc(d.timeout, d.expire)
	}
	return c, func() {
		cancel(nil)
		d.mu.Lock()
		defer d.mu.Unlock()
		d.pending.Remove(element)
	}
}

// expire ends the contexts whose time has come, and has the timer run on if others are left.
func (d *deadlines) expire() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running = false
	for element := d.pending.Front(); element != nil; element = d.pending.Front() {
		c := element.Value.(*deadlineContext) //nolint:forcetypeassert // nothing else is in it
		if left := time.Until(c.deadline); left > 0 {
			d.running = true
			time.AfterFunc(left, d.expire)
			return
		}
		d.pending.Remove(element)
		c.cancel(context.DeadlineExceeded)
	}
}
