package inbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"go.uber.org/goleak"

	"github.com/watermill-inbox/inbox"
)

const consumer = "orders"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type ctxKey struct{}

func newDeduplicator(t *testing.T, store inbox.Store, adjust ...func(*inbox.Config)) *inbox.Deduplicator {
	t.Helper()
	config := inbox.Config{Store: store, Consumer: consumer}
	for _, f := range adjust {
		f(&config)
	}
	dedup, err := inbox.NewDeduplicator(config)
	if err != nil {
		t.Fatal(err)
	}
	return dedup
}

// do is a handler with an effect in the transaction.
func do(msg *message.Message) ([]*message.Message, error) {
	tx, ok := inbox.TxFromContext[*nativeTx](msg.Context())
	if !ok {
		return nil, errors.New("no transaction")
	}
	tx.Do("effect of " + msg.UUID)
	return nil, nil
}

func newMessage(id string) *message.Message {
	return message.NewMessageWithContext(context.WithValue(context.Background(), ctxKey{}, "former"), id, []byte("payload"))
}

// answer is what the router would do with the result, and how a broker sees it.
type answer struct {
	produced []*message.Message
	err      error
	panicked any
	goexit   bool
}

// call runs the handler on a goroutine of its own, so that it may panic or exit.
func call(h message.HandlerFunc, msg *message.Message) (a answer) {
	done := make(chan struct{})
	go func() {
		returned := false
		defer close(done)
		defer func() {
			a.panicked = recover()
			a.goexit = !returned && a.panicked == nil
		}()
		a.produced, a.err = h(msg)
		returned = true
	}()
	<-done
	return a
}

// TestEveryPathIsSafe walks through what a handler, a store and a context can do to a delivery, in every combination, and
// checks what has to hold in all of them.
func TestEveryPathIsSafe(t *testing.T) {
	t.Parallel()

	handlers := map[string]message.HandlerFunc{
		"ok": do,
		"outputs": func(msg *message.Message) ([]*message.Message, error) {
			_, err := do(msg)
			return []*message.Message{message.NewMessage("out", nil)}, err
		},
		"error": func(msg *message.Message) ([]*message.Message, error) {
			_, _ = do(msg)
			return []*message.Message{message.NewMessage("out", nil)}, errHandler
		},
		"deadlock": func(msg *message.Message) ([]*message.Message, error) {
			_, _ = do(msg)
			return nil, fmt.Errorf("update stock: %w", errDeadlock)
		},
		"panic": func(msg *message.Message) ([]*message.Message, error) {
			_, _ = do(msg)
			panic(errHandler)
		},
		"goexit": func(msg *message.Message) ([]*message.Message, error) {
			_, _ = do(msg)
			runtime.Goexit()
			return nil, nil
		},
		"nil output": func(msg *message.Message) ([]*message.Message, error) {
			_, err := do(msg)
			return []*message.Message{nil}, err
		},
		"ack first": func(msg *message.Message) ([]*message.Message, error) {
			msg.Ack()
			return do(msg)
		},
		"foreign context": func(msg *message.Message) ([]*message.Message, error) {
			_, err := do(msg)
			msg.SetContext(context.WithValue(context.Background(), ctxKey{}, "handler's"))
			return nil, err
		},
	}
	stores := map[string]func(*fakeStore, inbox.Key){
		"ok": func(*fakeStore, inbox.Key) {},
		"begin fails": func(s *fakeStore, _ inbox.Key) {
			s.onBegin = func(context.Context, inbox.Claim) error { return errBegin }
		},
		"in flight": func(s *fakeStore, _ inbox.Key) {
			s.onBegin = func(context.Context, inbox.Claim) error { return fmt.Errorf("claim key: %w", inbox.ErrInFlight) }
		},
		"commit fails":   func(s *fakeStore, _ inbox.Key) { s.onCommit = func(context.Context) error { return errCommit } },
		"reply lost":     func(s *fakeStore, _ inbox.Key) { s.onReply = func() error { return errCommit } },
		"rollback fails": func(s *fakeStore, _ inbox.Key) { s.onRollback = func() error { return errRollback } },
		"always deadlock": func(s *fakeStore, _ inbox.Key) {
			s.onCommit = func(context.Context) error { return errDeadlock }
		},
		"one deadlock": func(s *fakeStore, _ inbox.Key) {
			var once sync.Once
			s.onCommit = func(context.Context) (err error) {
				once.Do(func() { err = errDeadlock })
				return err
			}
		},
		"duplicate": func(s *fakeStore, key inbox.Key) { s.rows[key] = &inbox.Record{} },
		"duplicate with outputs": func(s *fakeStore, key inbox.Key) {
			s.rows[key] = &inbox.Record{Outputs: []*message.Message{message.NewMessage("recorded", nil)}}
		},
	}
	contexts := map[string]func(context.Context, *message.Message, message.HandlerFunc) (context.Context, message.HandlerFunc){
		"alive": func(ctx context.Context, _ *message.Message, h message.HandlerFunc) (context.Context, message.HandlerFunc) {
			return ctx, h
		},
		"cancelled before": func(ctx context.Context, _ *message.Message, h message.HandlerFunc) (context.Context, message.HandlerFunc) {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			return ctx, h
		},
		"cancelled in the handler": func(ctx context.Context, _ *message.Message, h message.HandlerFunc) (context.Context, message.HandlerFunc) {
			ctx, cancel := context.WithCancel(ctx)
			return ctx, func(msg *message.Message) ([]*message.Message, error) {
				cancel()
				return h(msg)
			}
		},
	}

	for handlerName, handler := range handlers {
		for storeName, prepare := range stores {
			for contextName, arrange := range contexts {
				t.Run(strings.Join([]string{handlerName, storeName, contextName}, "/"), func(t *testing.T) {
					t.Parallel()
					store := newFakeStore()
					key := inbox.Key{Consumer: consumer, MessageID: "id"}
					prepare(store, key)
					duplicate := store.rows[key] != nil
					observer := &recordingObserver{}
					dedup := newDeduplicator(t, store, func(c *inbox.Config) { c.Observer = observer })

					msg := newMessage("id")
					var runs int
					ctx, h := arrange(msg.Context(), msg, handler)
					msg.SetContext(ctx)
					a := call(dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
						runs++
						return h(msg)
					}), msg)

					succeeded := a.err == nil && a.panicked == nil && !a.goexit
					committed := !duplicate && store.row("id") != nil
					if succeeded && !committed && !duplicate {
						t.Error("would be acknowledged without a committed record")
					}
					if want := map[bool]int{true: 1}[committed]; len(store.effects) != want {
						t.Errorf("%d effects, want %d", len(store.effects), want)
					}
					if duplicate && runs > 0 {
						t.Error("the handler ran for a duplicate")
					}
					if open := store.openTransactions(); open != 0 {
						t.Errorf("%d transactions left open", open)
					}
					if msg.Context() != ctx {
						t.Error("the message's context was not restored")
					}
					if !succeeded && len(a.produced) > 0 {
						t.Error("messages beside an error")
					}
					if a.goexit && !isClosed(msg.Nacked()) && handlerName != "ack first" {
						t.Error("Goexit: the message was not nacked")
					}
					if !a.goexit && isClosed(msg.Nacked()) {
						t.Error("nacked by the middleware, although the router answers")
					}
					if a.panicked != nil && a.panicked != any(errHandler) {
						t.Errorf("the panic's value changed: %v", a.panicked)
					}
					if runs > 0 && handlerName == "error" && a.err != errHandler && ctx.Err() == nil { //nolint:errorlint // untouched
						t.Errorf("the handler's error changed: %v", a.err)
					}
					if contextName == "cancelled before" && (runs > 0 || !errors.Is(a.err, context.Canceled)) {
						t.Errorf("cancelled before: %d runs, %v", runs, a.err)
					}
					if a.err != nil && ctx.Err() != nil && runs > 0 && !errors.Is(a.err, context.Canceled) && store.onCommit == nil &&
						store.onReply == nil && handlerName != "nil output" {
						t.Errorf("%v does not tell that the context was cancelled", a.err)
					}
					if len(observer.events) != 1 {
						t.Fatalf("%d events", len(observer.events))
					}
					want := inbox.Failed
					switch {
					case succeeded && duplicate:
						want = inbox.Duplicate
					case succeeded:
						want = inbox.Processed
					case errors.Is(a.err, inbox.ErrInFlight):
						want = inbox.InFlight
					}
					if got := observer.events[0].Outcome; got != want {
						t.Errorf("outcome %q, want %q", got, want)
					}

					// Whatever happened: a healthy redelivery ends with exactly one effect.
					store.onBegin, store.onCommit, store.onReply, store.onRollback = nil, nil, nil, nil
					redelivered := newMessage("id")
					if a := call(dedup.Middleware(do), redelivered); a.err != nil {
						t.Fatalf("redelivery: %v", a.err)
					}
					redelivered.Ack()
					if !duplicate && len(store.effects) != 1 {
						t.Errorf("%d effects after the redelivery", len(store.effects))
					}
					msg.Nack()
					closeDeduplicator(t, dedup)
				})
			}
		}
	}
}

func TestTransientErrorsRunTheWholeUnitAgain(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ retries, want int }{{0, 4}, {1, 2}, {inbox.NoTransientRetries, 1}} {
		synctest.Test(t, func(t *testing.T) {
			store := newFakeStore()
			store.onCommit = func(context.Context) error { return errDeadlock }
			dedup := newDeduplicator(t, store, func(c *inbox.Config) { c.TransientRetries = tt.retries })
			runs := 0
			_, err := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
				runs++
				return do(msg)
			})(newMessage("id"))
			if !errors.Is(err, errDeadlock) || !dedup.IsTransient(err) {
				t.Errorf("error %v", err)
			}
			if runs != tt.want || store.begins != tt.want || store.rollbacks != tt.want {
				t.Errorf("TransientRetries %d: %d runs, %d begins, %d rollbacks, want %d each",
					tt.retries, runs, store.begins, store.rollbacks, tt.want)
			}
		})
	}
}

func TestDeliveriesOfOneKeyGoOneAfterTheOther(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	dedup := newDeduplicator(t, store)
	var running, most, runs atomic.Int32
	h := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		runs.Add(1)
		most.Store(max(most.Load(), running.Add(1)))
		defer running.Add(-1)
		runtime.Gosched()
		return do(msg)
	})
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, err := h(newMessage("id")); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if runs.Load() != 1 || most.Load() != 1 || len(store.effects) != 1 {
		t.Errorf("%d runs, %d at a time, %d effects", runs.Load(), most.Load(), len(store.effects))
	}
}

func TestWaitersForAMessageInFlight(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := newFakeStore()
		dedup := newDeduplicator(t, store)
		finish := make(chan error)
		h := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
			if err := <-finish; err != nil {
				return nil, err
			}
			return do(msg)
		})
		results := make(chan error, 4)
		deliver := func(ctx context.Context) {
			go func() {
				msg := newMessage("id")
				msg.SetContext(ctx)
				_, err := h(msg)
				results <- err
			}()
			synctest.Wait()
		}
		deliver(t.Context())

		// They hold no connection, other keys are not held up, and they give up after LockTimeout, or with their context.
		started := time.Now()
		deliver(t.Context())
		hasty, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		deliver(hasty)
		cancelled, cancelNow := context.WithCancel(t.Context())
		deliver(cancelled)
		if store.openTransactions() != 1 || store.begins != 1 {
			t.Errorf("%d transactions open, %d begun", store.openTransactions(), store.begins)
		}
		if _, err := dedup.Middleware(do)(newMessage("other")); err != nil {
			t.Errorf("another key: %v", err)
		}
		cancelNow()
		if err := <-results; !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled waiter: %v", err)
		}
		if err := <-results; !errors.Is(err, inbox.ErrInFlight) {
			t.Errorf("waiter with a deadline: %v", err)
		}
		if waited := time.Since(started); waited >= time.Second {
			t.Errorf("waited %s, past the deadline", waited)
		}
		if err := <-results; !errors.Is(err, inbox.ErrInFlight) {
			t.Errorf("waiter: %v", err)
		}
		if waited := time.Since(started); waited != 10*time.Second {
			t.Errorf("waited %s, not LockTimeout", waited)
		}

		// The first one fails: the next in line runs.
		deliver(t.Context())
		finish <- errHandler
		if err := <-results; !errors.Is(err, errHandler) {
			t.Errorf("first: %v", err)
		}
		finish <- nil
		if err := <-results; err != nil {
			t.Errorf("second: %v", err)
		}
		if len(store.effects) != 2 { // and the other key's
			t.Errorf("effects %q", store.effects)
		}
	})
}

func TestTimeWaitedInMemoryCountsForTheClaim(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := newFakeStore()
		dedup := newDeduplicator(t, store)
		h := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
			time.Sleep(4 * time.Second)
			return do(msg)
		})
		done := make(chan error)
		for range 2 {
			go func() {
				_, err := h(newMessage("id"))
				done <- err
			}()
		}
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		got := []time.Duration{store.claims[0].LockTimeout, store.claims[1].LockTimeout}
		if want := []time.Duration{10 * time.Second, 6 * time.Second}; !slices.Equal(got, want) {
			t.Errorf("lock timeouts %v, want %v", got, want)
		}
	})
}

func TestLockTimeoutEndsBeforeTheContextDoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := newFakeStore()
		msg := newMessage("id")
		ctx, cancel := context.WithTimeout(msg.Context(), 5*time.Second)
		defer cancel()
		msg.SetContext(ctx)
		if _, err := newDeduplicator(t, store).Middleware(do)(msg); err != nil {
			t.Fatal(err)
		}
		if got := store.claims[0].LockTimeout; got != 4*time.Second {
			t.Errorf("lock timeout %s", got)
		}
	})
}

func TestCommitOutlivesTheMessagesContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := newFakeStore()
		var commitErr error
		var bound time.Duration
		store.onCommit = func(ctx context.Context) error {
			commitErr = ctx.Err()
			deadline, _ := ctx.Deadline()
			bound = time.Until(deadline)
			return nil
		}
		msg := newMessage("id")
		ctx, cancel := context.WithCancel(msg.Context())
		msg.SetContext(ctx)
		_, err := newDeduplicator(t, store).Middleware(func(msg *message.Message) ([]*message.Message, error) {
			cancel()
			return do(msg)
		})(msg)
		if err != nil || commitErr != nil || bound != 10*time.Second {
			t.Errorf("error %v, commit's context: %v, bound %s", err, commitErr, bound)
		}
	})
}

func TestShutdownGrace(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name            string
		grace, deadline time.Duration
		want            time.Duration // from the cancellation to the end of the handler's context
		wantErr         error
	}{
		{name: "off", want: 0, wantErr: context.Canceled},
		{name: "on", grace: 3 * time.Second, want: 3 * time.Second, wantErr: context.Canceled},
		{name: "deadline kept", grace: 3 * time.Second, deadline: time.Second, want: time.Second, wantErr: context.DeadlineExceeded},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				dedup := newDeduplicator(t, newFakeStore(), func(c *inbox.Config) { c.ShutdownGrace = tt.grace })
				msg := newMessage("id")
				ctx := msg.Context()
				if tt.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.deadline)
					defer cancel()
				}
				ctx, cancel := context.WithCancel(ctx)
				msg.SetContext(ctx)
				var lived time.Duration
				_, err := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
					cancel()
					started := time.Now()
					<-msg.Context().Done()
					lived = time.Since(started)
					if msg.Context().Value(ctxKey{}) != "former" {
						t.Error("the context lost its values")
					}
					return nil, errHandler
				})(msg)
				if lived != tt.want {
					t.Errorf("the handler's context lived for %s, want %s", lived, tt.want)
				}
				if !errors.Is(err, errHandler) || !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("error %v", err)
				}
				if err.Error() != errHandler.Error() {
					t.Errorf("the text changed: %v", err)
				}
			})
		})
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	fromMetadata := func(c *inbox.Config) { c.MessageID = inbox.MessageIDFromMetadata("event_id") }
	hashed := func(c *inbox.Config) { c.MessageID = middleware.NewMessageHasherSHA256(1 << 20) }
	hashedField := func(c *inbox.Config) { c.MessageID = middleware.NewMessageHasherFromMetadataField("event_id") }
	noConsumer := func(c *inbox.Config) { c.Consumer = "" }

	for _, tt := range []struct {
		name   string
		msg    *message.Message
		adjust func(*inbox.Config)
		want   error
	}{
		{name: "UUID", msg: newMessage("id")},
		{name: "empty UUID", msg: newMessage(""), want: inbox.ErrInvalidKey},
		{name: "zero message", msg: &message.Message{}, want: inbox.ErrInvalidKey},
		{name: "zero message with UUID", msg: &message.Message{UUID: "id"}},
		{name: "no handler name", msg: newMessage("id"), adjust: noConsumer, want: inbox.ErrInvalidKey},
		{name: "metadata", msg: withMetadata(newMessage(""), "event_id", "7"), adjust: fromMetadata},
		{name: "metadata absent", msg: newMessage("id"), adjust: fromMetadata, want: inbox.ErrInvalidKey},
		{name: "metadata nil", msg: &message.Message{UUID: "id"}, adjust: fromMetadata, want: inbox.ErrInvalidKey},
		{name: "hasher", msg: newMessage(""), adjust: hashed},
		{name: "hasher's field absent", msg: newMessage("id"), adjust: hashedField, want: inbox.ErrInvalidKey},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			store := newFakeStore()
			var adjust []func(*inbox.Config)
			if tt.adjust != nil {
				adjust = append(adjust, tt.adjust)
			}
			dedup := newDeduplicator(t, store, adjust...)
			_, err := dedup.Middleware(do)(tt.msg)
			if !errors.Is(err, tt.want) {
				t.Fatalf("error %v, want %v", err, tt.want)
			}
			if tt.want != nil {
				if store.begins != 0 {
					t.Error("a transaction was begun")
				}
				if !dedup.ShouldPoison(err) {
					t.Error("not to be poisoned, although a redelivery does not help")
				}
			}
		})
	}
}

func withMetadata(msg *message.Message, name, value string) *message.Message {
	msg.Metadata.Set(name, value)
	return msg
}

func TestConsumerIsTheHandlerNameUnlessConfigured(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	dedup := newDeduplicator(t, store, func(c *inbox.Config) { c.Consumer = "" })
	runRouter(t, dedup, message.NewMessage("id", nil))
	if got := store.claims[0].Key; got != (inbox.Key{Consumer: "router_handler", MessageID: "id"}) {
		t.Errorf("key %+v", got)
	}
}

func TestSkipBypassesTheInbox(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	observer := &recordingObserver{}
	dedup := newDeduplicator(t, store, func(c *inbox.Config) {
		c.Skip = func(msg *message.Message) bool { return msg.Metadata.Get("type") == "ping" }
		c.Observer = observer
	})
	msg := withMetadata(newMessage("id"), "type", "ping")
	for range 2 {
		_, err := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
			if _, ok := inbox.TxFromContext[*nativeTx](msg.Context()); ok {
				t.Error("a transaction")
			}
			return nil, errHandler
		})(msg)
		if !errors.Is(err, errHandler) {
			t.Error(err)
		}
	}
	if store.begins != 0 || len(observer.events) != 2 || observer.events[0].Outcome != inbox.Bypassed {
		t.Errorf("%d begins, events %+v", store.begins, observer.events)
	}
}

func TestFingerprintTellsAnotherPayload(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	dedup := newDeduplicator(t, store, func(c *inbox.Config) { c.Fingerprint = true })
	deliver := func(payload string) error {
		_, err := dedup.Middleware(do)(message.NewMessage("id", []byte(payload)))
		return err
	}
	if err := deliver("a"); err != nil {
		t.Fatal(err)
	}
	if err := deliver("a"); err != nil {
		t.Errorf("same payload: %v", err)
	}
	if err := deliver("b"); !errors.Is(err, inbox.ErrPayloadMismatch) || !dedup.ShouldPoison(err) {
		t.Errorf("other payload: %v", err)
	}
	store.rows[inbox.Key{Consumer: consumer, MessageID: "id"}].Fingerprint = nil
	if err := deliver("b"); err != nil {
		t.Errorf("record without a fingerprint: %v", err)
	}
}

// TestStorePayloadStoresWhatWasDelivered has a handler change the message before it has to be run again.
func TestStorePayloadStoresWhatWasDelivered(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	dedup := newDeduplicator(t, store, func(c *inbox.Config) { c.StorePayload = true })
	msg := message.NewMessage("id", []byte("delivered"))
	msg.Metadata.Set("by", "producer")
	_, err := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		msg.Payload = []byte("changed")
		msg.Metadata.Set("by", "handler")
		if store.begins == 1 {
			return nil, errDeadlock
		}
		return nil, nil
	})(msg)
	if err != nil || len(store.claims) != 2 {
		t.Fatalf("%d claims, error %v", len(store.claims), err)
	}
	if got := store.claims[1].Message; string(got.Payload) != "delivered" || got.Metadata.Get("by") != "producer" {
		t.Errorf("stored payload %q, metadata %v", got.Payload, got.Metadata)
	}
}

func TestStorePayloadPassesTheMessageToTheStore(t *testing.T) {
	t.Parallel()
	for _, on := range []bool{false, true} {
		store := newFakeStore()
		msg := newMessage("id")
		if _, err := newDeduplicator(t, store, func(c *inbox.Config) { c.StorePayload = on }).Middleware(do)(msg); err != nil {
			t.Fatal(err)
		}
		if got := store.claims[0].Message; (got != nil) != on || on && (got.UUID != msg.UUID || !bytes.Equal(got.Payload, msg.Payload)) {
			t.Errorf("StorePayload %t: passed %+v", on, got)
		}
	}
}

func TestOnDuplicateTellsWhenTheFirstWasProcessed(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	var calls []inbox.OnDuplicateParams
	dedup := newDeduplicator(t, store, func(c *inbox.Config) {
		c.OnDuplicate = func(p inbox.OnDuplicateParams) { calls = append(calls, p) }
	})
	second := newMessage("id")
	for _, msg := range []*message.Message{newMessage("id"), second} {
		if _, err := dedup.Middleware(do)(msg); err != nil {
			t.Fatal(err)
		}
	}
	row := store.row("id")
	want := []inbox.OnDuplicateParams{{
		Message: second, Key: inbox.Key{Consumer: consumer, MessageID: "id"},
		ReceivedAt: row.ReceivedAt, ProcessedAt: row.ProcessedAt,
	}}
	if !reflect.DeepEqual(calls, want) {
		t.Errorf("got %+v", calls)
	}
}

func TestMiddlewareAddedTwiceIsAnError(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	dedup, other := newDeduplicator(t, store), newDeduplicator(t, store)
	for name, h := range map[string]message.HandlerFunc{
		"the same one": dedup.Middleware(dedup.Middleware(do)),
		"one like it":  dedup.Middleware(other.Middleware(do)),
	} {
		if _, err := h(newMessage("id")); err == nil || !strings.Contains(err.Error(), "added twice") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(store.effects) != 0 {
		t.Errorf("effects %q", store.effects)
	}

	// An inbox on another database is no mistake.
	inner := newDeduplicator(t, newFakeStore())
	if _, err := dedup.Middleware(inner.Middleware(do))(newMessage("id")); err != nil {
		t.Error(err)
	}
}

func TestAcknowledgedBeforeCommitIsLogged(t *testing.T) {
	t.Parallel()
	logger := watermill.NewCaptureLogger()
	dedup := newDeduplicator(t, newFakeStore(), func(c *inbox.Config) { c.Logger = logger })
	h := middleware.InstantAck(dedup.Middleware(do))
	if _, err := h(newMessage("id")); err != nil {
		t.Fatal(err)
	}
	if logged := logger.Captured()[watermill.ErrorLogLevel]; len(logged) != 1 || logged[0].Fields["handler_name"] != consumer {
		t.Errorf("logged %+v", logged)
	}
}

func TestNothingOfAPayloadIsLogged(t *testing.T) {
	t.Parallel()
	logger := watermill.NewCaptureLogger()
	store := newFakeStore()
	dedup := newDeduplicator(t, store, func(c *inbox.Config) { c.Logger = logger })
	for _, h := range []message.HandlerFunc{
		do, do,
		func(*message.Message) ([]*message.Message, error) { return nil, errHandler },
		func(*message.Message) ([]*message.Message, error) { runtime.Goexit(); return nil, nil },
		func(msg *message.Message) ([]*message.Message, error) { msg.Ack(); return nil, nil },
	} {
		call(dedup.Middleware(h), withMetadata(message.NewMessage("id", []byte("SECRET")), "name", "SECRET"))
	}
	if len(logger.Captured()) == 0 {
		t.Error("nothing was logged")
	}
	if strings.Contains(fmt.Sprintf("%+v", logger.Captured()), "SECRET") {
		t.Error("a payload was logged")
	}
}

func TestShouldPoison(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	dedup := newDeduplicator(t, store, func(c *inbox.Config) { c.TransientRetries = inbox.NoTransientRetries })
	fail := func(err error) error {
		_, err = dedup.Middleware(func(*message.Message) ([]*message.Message, error) { return nil, err })(newMessage("id"))
		return err
	}
	store.onBegin = func(context.Context, inbox.Claim) error { return errBegin }
	beginErr := fail(nil)
	store.onBegin = nil
	store.lost = true
	lostErr := fail(errHandler)
	store.lost = false
	if lostErr.Error() != errHandler.Error() || !errors.Is(lostErr, errHandler) {
		t.Errorf("the handler's error changed: %v", lostErr)
	}
	for _, tt := range []struct {
		name string
		err  error
		want bool
	}{
		{"nil", nil, false},
		{"handler's error", fail(errHandler), true},
		{"invalid key", fmt.Errorf("wrapped: %w", inbox.ErrInvalidKey), true},
		{"in flight", fmt.Errorf("wrapped: %w", inbox.ErrInFlight), false},
		{"cancelled", fail(context.Canceled), false},
		{"deadline", fail(context.DeadlineExceeded), false},
		{"transient", fail(errDeadlock), false},
		{"begin", beginErr, false},
		{"connection lost", lostErr, false},
	} {
		if got := dedup.ShouldPoison(tt.err); got != tt.want {
			t.Errorf("%s (%v): %t", tt.name, tt.err, got)
		}
	}
}

func TestConfigFaultsAreNamed(t *testing.T) {
	t.Parallel()
	var typedNil *fakeStore
	ok := inbox.Config{Store: newFakeStore()}
	for _, tt := range []struct {
		name   string
		adjust func(*inbox.Config)
		want   []string
	}{
		{"zero", func(c *inbox.Config) { *c = inbox.Config{} }, []string{"Store"}},
		{"typed nil", func(c *inbox.Config) { c.Store = typedNil }, []string{"Store"}},
		{"not comparable", func(c *inbox.Config) { c.Store = uncomparableStore{} }, []string{"Store"}},
		{"no outbox", func(c *inbox.Config) { c.Outputs = inbox.OutputsOutbox }, []string{"Outbox"}},
		{"stray outbox", func(c *inbox.Config) { c.Outbox = &publisherFunc{} }, []string{"Outbox"}},
		{"mode", func(c *inbox.Config) { c.Outputs = 7 }, []string{"Outputs"}},
		{
			"negative", func(c *inbox.Config) {
				c.LockTimeout, c.CommitTimeout, c.ShutdownGrace, c.TransientRetries = -1, -1, -1, -2
			},
			[]string{"LockTimeout", "CommitTimeout", "ShutdownGrace", "TransientRetries"},
		},
	} {
		config := ok
		tt.adjust(&config)
		_, err := inbox.NewDeduplicator(config)
		for _, field := range tt.want {
			if err == nil || !strings.Contains(err.Error(), "Config."+field) {
				t.Errorf("%s: %v does not name %s", tt.name, err, field)
			}
		}
	}
}

func TestProcess(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	dedup := newDeduplicator(t, store)
	work := func(ctx context.Context) error {
		tx, _ := inbox.TxFromContext[*nativeTx](ctx)
		tx.Do("webhook")
		return nil
	}
	key := inbox.Key{Consumer: "webhook", MessageID: "id"}
	if err := dedup.Process(t.Context(), key, func(context.Context) error { return errHandler }); err != errHandler { //nolint:errorlint // untouched
		t.Errorf("failing: %v", err)
	}
	if err := dedup.Process(t.Context(), key, work); err != nil {
		t.Errorf("first: %v", err)
	}
	if err := dedup.Process(t.Context(), key, work); !errors.Is(err, inbox.ErrDuplicate) {
		t.Errorf("second: %v", err)
	}
	if err := dedup.Process(t.Context(), inbox.Key{MessageID: "id"}, work); err != nil { // Config.Consumer
		t.Errorf("another consumer: %v", err)
	}
	if err := dedup.Process(t.Context(), inbox.Key{Consumer: "webhook"}, work); !errors.Is(err, inbox.ErrInvalidKey) {
		t.Errorf("no ID: %v", err)
	}
	if len(store.effects) != 2 || store.openTransactions() != 0 {
		t.Errorf("effects %q, %d open", store.effects, store.openTransactions())
	}
}

func TestObserverSeesDurationsAndRetries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := newFakeStore()
		var once sync.Once
		store.onBegin = func(context.Context, inbox.Claim) error { time.Sleep(time.Second); return nil }
		store.onCommit = func(context.Context) (err error) {
			time.Sleep(3 * time.Second)
			once.Do(func() { err = errDeadlock })
			return err
		}
		observer := &recordingObserver{}
		dedup := newDeduplicator(t, store, func(c *inbox.Config) { c.Observer = observer })
		if _, err := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
			time.Sleep(2 * time.Second)
			return do(msg)
		})(newMessage("id")); err != nil {
			t.Fatal(err)
		}
		event := observer.events[0]
		if event.Context.Value(ctxKey{}) != "former" {
			t.Error("not the message's context")
		}
		event.Context = nil
		want := inbox.DeliveryEvent{
			Key: inbox.Key{Consumer: consumer, MessageID: "id"}, Outcome: inbox.Processed, Retries: 1,
			Claim: 2 * time.Second, Handler: 4 * time.Second, Commit: 6 * time.Second,
		}
		if event != want {
			t.Errorf("got %+v, want %+v", event, want)
		}
	})
}

type recordingObserver struct {
	mu     sync.Mutex
	events []inbox.DeliveryEvent
}

func (o *recordingObserver) ObserveDelivery(event inbox.DeliveryEvent) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.events = append(o.events, event)
}

type uncomparableStore struct{ _ []int }

func (uncomparableStore) Begin(context.Context, inbox.Claim) (inbox.Tx, error) { return nil, errBegin }

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

func closeDeduplicator(t *testing.T, dedup *inbox.Deduplicator) {
	t.Helper()
	if err := dedup.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
