package e2e_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/sqlstore/pgxstore"
)

var errScripted = errors.New("scripted")

// newBroker returns a broker in memory, whose Publish returns when the message was acknowledged.
func newBroker() *gochannel.GoChannel {
	return gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
}

func newDeduplicator(t *testing.T, config inbox.Config) *inbox.Deduplicator {
	t.Helper()
	dedup, err := inbox.NewDeduplicator(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := dedup.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return dedup
}

// start runs the router until the test ends.
func start(t *testing.T, router *message.Router) {
	t.Helper()
	ended := make(chan error)
	go func() { ended <- router.Run(context.Background()) }()
	<-router.Running()
	t.Cleanup(func() {
		if err := router.Close(); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestTheSameWiringOnGoChannelAndSQLite is the test of RabbitMQ and PostgreSQL with another broker and another store.
func TestTheSameWiringOnGoChannelAndSQLite(t *testing.T) {
	t.Parallel()
	const orders = 200
	s := openShop(t, "sqlite", sqliteDSN(t))
	broker := newBroker()
	router, err := s.wire(newDeduplicator(t, inbox.Config{Store: s.store}), broker, broker, "", "take_from_stock")
	if err != nil {
		t.Fatal(err)
	}
	start(t, router)
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for i := range orders {
				if i%2 == worker%2 { // each order is delivered by two of the workers
					id := fmt.Sprintf("order-%d", i)
					if err := broker.Publish("orders", message.NewMessage(id, []byte(id))); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	wantCounts(t, s, map[string]int{
		"SELECT -pieces FROM {stock}": orders, "SELECT count(DISTINCT id) FROM {effects}": orders, "SELECT count(*) FROM {inbox}": orders,
	})
}

// collector is a publisher that keeps what it gets.
type collector struct {
	mu   sync.Mutex
	msgs []*message.Message
}

func (c *collector) Publish(_ string, msgs ...*message.Message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.msgs = append(c.msgs, msgs...)
	return nil
}

func (c *collector) Close() error { return nil }

func (c *collector) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.msgs)
}

// TestMiddlewareOrder has the documented outcome of the recommended order, and of others.
func TestMiddlewareOrder(t *testing.T) {
	t.Parallel()
	retry := middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond, ResetContextOnRetry: true}.Middleware
	staleRetry := middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}.Middleware
	shortTimeout := middleware.Timeout(100 * time.Millisecond)
	fail := func(s *shop, runs *atomic.Int32) message.NoPublishHandlerFunc {
		return func(msg *message.Message) error {
			runs.Add(1)
			return errors.Join(s.takeFromStock(msg), errScripted)
		}
	}
	for _, tt := range []struct {
		name  string
		store string
		order func(poison, inbox message.HandlerMiddleware) []message.HandlerMiddleware
		// handler fails as the case needs it.
		handler func(s *shop, runs *atomic.Int32) message.NoPublishHandlerFunc
		// How often it ran, what was poisoned, and what is left in the database, when the message is settled.
		runs     int32
		poisoned int
		effects  int
		rows     int
		// never: the message is not settled, but delivered again and again.
		never bool
		hint  string
	}{
		{
			name: "recommended, failing", store: "sqlite",
			order: func(poison, inbox message.HandlerMiddleware) []message.HandlerMiddleware {
				return []message.HandlerMiddleware{poison, retry, middleware.Timeout(10 * time.Second), middleware.Recoverer, inbox}
			},
			handler: fail, runs: 3, poisoned: 1,
		},
		{
			name: "recommended, panicking", store: "sqlite",
			order: func(poison, inbox message.HandlerMiddleware) []message.HandlerMiddleware {
				return []message.HandlerMiddleware{poison, retry, middleware.Timeout(10 * time.Second), middleware.Recoverer, inbox}
			},
			handler: func(s *shop, runs *atomic.Int32) message.NoPublishHandlerFunc {
				return func(msg *message.Message) error {
					runs.Add(1)
					_ = s.takeFromStock(msg)
					panic("scripted")
				}
			},
			runs: 3, poisoned: 1,
		},
		{
			name: "recommended, failing once after a timeout", store: "sqlite",
			order: func(poison, inbox message.HandlerMiddleware) []message.HandlerMiddleware {
				return []message.HandlerMiddleware{poison, retry, shortTimeout, middleware.Recoverer, inbox}
			},
			handler: func(s *shop, runs *atomic.Int32) message.NoPublishHandlerFunc {
				return func(msg *message.Message) error {
					if runs.Add(1) == 1 {
						<-msg.Context().Done()
						return msg.Context().Err()
					}
					return s.takeFromStock(msg)
				}
			},
			runs: 2, effects: 1, rows: 1,
		},
		{
			name: "PoisonQueue inside of the inbox commits half a failure", store: "sqlite",
			order: func(poison, inbox message.HandlerMiddleware) []message.HandlerMiddleware {
				return []message.HandlerMiddleware{inbox, poison}
			},
			handler: fail, runs: 1, poisoned: 1, effects: 1, rows: 1,
		},
		{
			name: "Retry inside of the inbox repeats in one transaction", store: "sqlite",
			order: func(poison, inbox message.HandlerMiddleware) []message.HandlerMiddleware {
				return []message.HandlerMiddleware{poison, inbox, retry}
			},
			handler: func(s *shop, runs *atomic.Int32) message.NoPublishHandlerFunc {
				return func(msg *message.Message) error {
					if err := s.takeFromStock(msg); err != nil {
						return err
					}
					if runs.Add(1) == 1 {
						return errScripted
					}
					return nil
				}
			},
			runs: 2, effects: 2, rows: 1,
		},
		{
			name: "Retry inside of the inbox, on PostgreSQL, in an aborted transaction", store: "pgx",
			order: func(poison, inbox message.HandlerMiddleware) []message.HandlerMiddleware {
				return []message.HandlerMiddleware{poison, inbox, retry}
			},
			handler: func(s *shop, runs *atomic.Int32) message.NoPublishHandlerFunc {
				return func(msg *message.Message) error {
					runs.Add(1)
					return errors.Join(s.exec(msg.Context(), "SELECT 1/0"), s.takeFromStock(msg))
				}
			},
			runs: 3, poisoned: 1, hint: "put Retry and PoisonQueue outside the inbox",
		},
		{
			name: "Recoverer outside of PoisonQueue: panics are never poisoned", store: "sqlite",
			order: func(poison, inbox message.HandlerMiddleware) []message.HandlerMiddleware {
				return []message.HandlerMiddleware{middleware.Recoverer, poison, retry, inbox}
			},
			handler: func(_ *shop, runs *atomic.Int32) message.NoPublishHandlerFunc {
				return func(*message.Message) error {
					runs.Add(1)
					panic("scripted")
				}
			},
			never: true,
		},
		{
			name: "Retry without ResetContextOnRetry outside of Timeout: every retry begins with an ended context", store: "sqlite",
			order: func(_, inbox message.HandlerMiddleware) []message.HandlerMiddleware {
				return []message.HandlerMiddleware{staleRetry, shortTimeout, middleware.Recoverer, inbox}
			},
			handler: func(s *shop, runs *atomic.Int32) message.NoPublishHandlerFunc {
				return func(msg *message.Message) error {
					runs.Add(1)
					<-msg.Context().Done()
					return msg.Context().Err()
				}
			},
			never: true,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dsn := sqliteDSN(t)
			if tt.store == "pgx" {
				dsn = testenv.PostgreSQL(t)
			}
			s := openShop(t, tt.store, dsn)
			logger := watermill.NewCaptureLogger()
			dedup := newDeduplicator(t, inbox.Config{Store: s.store, Logger: logger})
			poisoned := &collector{}
			poison, err := middleware.PoisonQueueWithFilter(poisoned, "poison", dedup.ShouldPoison)
			if err != nil {
				t.Fatal(err)
			}
			router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
			if err != nil {
				t.Fatal(err)
			}
			router.AddMiddleware(tt.order(poison, dedup.Middleware)...)
			broker := newBroker()
			var runs atomic.Int32
			router.AddConsumerHandler("handler", "orders", broker, tt.handler(s, &runs))
			start(t, router)

			settled := make(chan error, 1)
			go func() { settled <- broker.Publish("orders", message.NewMessage("id", []byte("id"))) }()
			if tt.never {
				waitFor(t, 20*time.Second, "deliveries again and again", func() bool { return runs.Load() >= 5 })
				if poisoned.count() != 0 {
					t.Error("poisoned")
				}
				return
			}
			if err := <-settled; err != nil {
				t.Fatal(err)
			}
			if runs.Load() != tt.runs || poisoned.count() != tt.poisoned {
				t.Errorf("%d runs, want %d; %d poisoned, want %d", runs.Load(), tt.runs, poisoned.count(), tt.poisoned)
			}
			wantCounts(t, s, map[string]int{"SELECT count(*) FROM {effects}": tt.effects, "SELECT count(*) FROM {inbox}": tt.rows})
			if logged := fmt.Sprintf("%+v", logger.Captured()[watermill.ErrorLogLevel]); !strings.Contains(logged, tt.hint) {
				t.Errorf("logged %s", logged)
			}
		})
	}
}

// TestReplayKeepsEveryByte publishes outputs again from each database, after a publish that failed.
func TestReplayKeepsEveryByte(t *testing.T) {
	t.Parallel()
	large := make([]byte, 5<<20)
	for i := range large {
		large[i] = byte(i * 7)
	}
	payloads := [][]byte{nil, {}, {0x08, 0x96, 0x01, 0x12, 0x00}, {0xff, 0xfe}, []byte("a\x00b\\u0000"), large}
	for store, dsn := range map[string]func(*testing.T) string{
		"pgx":    func(t *testing.T) string { return testenv.PostgreSQL(t) },
		"stdlib": func(t *testing.T) string { return testenv.PostgreSQL(t) },
		"mysql":  func(t *testing.T) string { return testenv.MariaDB(t) + "&maxAllowedPacket=0" },
		"sqlite": sqliteDSN,
	} {
		t.Run(store, func(t *testing.T) {
			t.Parallel()
			s := openShop(t, store, dsn(t))
			dedup := newDeduplicator(t, inbox.Config{Store: s.store, Consumer: "consumer"})
			runs := 0
			h := dedup.Middleware(func(*message.Message) ([]*message.Message, error) {
				runs++
				var outputs []*message.Message
				for i, payload := range payloads {
					output := message.NewMessage(fmt.Sprintf("%d \xff", i), payload)
					output.Metadata.Set("odd \xff\x00", "\x00\xfe <&> é")
					outputs = append(outputs, output)
				}
				return outputs, nil
			})
			for range 3 {
				msg := message.NewMessage("id", nil)
				outputs, err := h(msg)
				msg.Nack() // as after a publish that failed
				if err != nil || len(outputs) != len(payloads) {
					t.Fatalf("%d outputs, %v", len(outputs), err)
				}
				for i, output := range outputs {
					if output.UUID != fmt.Sprintf("%d \xff", i) || string(output.Payload) != string(payloads[i]) ||
						output.Metadata.Get("odd \xff\x00") != "\x00\xfe <&> é" || len(output.Metadata) != 1 {
						t.Errorf("output %d changed", i)
					}
				}
			}
			if runs != 1 {
				t.Errorf("%d runs", runs)
			}
		})
	}
}

// TestWaitersHoldNoConnection has duplicates of one slow message beside other messages, on a pool of five.
func TestWaitersHoldNoConnection(t *testing.T) {
	t.Parallel()
	s := openShop(t, "pgx", testenv.PostgreSQL(t))
	config, err := pgxpool.ParseConfig(testenv.PostgreSQL(t))
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 5
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	store, err := pgxstore.New(pool, pgxstore.Config{Table: s.Prefix + "inbox"})
	if err != nil {
		t.Fatal(err)
	}
	dedup := newDeduplicator(t, inbox.Config{Store: store, Consumer: "consumer", LockTimeout: 2 * time.Second})
	finish, entered := make(chan struct{}), make(chan struct{})
	slow := dedup.Middleware(func(*message.Message) ([]*message.Message, error) {
		close(entered)
		<-finish
		return nil, nil
	})
	results := make(chan error)
	deliver := func() {
		_, err := slow(message.NewMessage("slow", nil))
		results <- err
	}
	go deliver()
	<-entered
	for range 10 {
		go deliver()
	}
	nop := dedup.Middleware(func(*message.Message) ([]*message.Message, error) { return nil, nil })
	for i := range 200 {
		if _, err := nop(message.NewMessage(fmt.Sprint(i), nil)); err != nil {
			t.Fatal(err)
		}
		if acquired := pool.Stat().AcquiredConns(); acquired > 1 {
			t.Fatalf("%d connections in use", acquired)
		}
	}
	for range 10 {
		if err := <-results; !errors.Is(err, inbox.ErrInFlight) || dedup.ShouldPoison(err) {
			t.Errorf("duplicate: %v", err)
		}
	}
	close(finish)
	if err := <-results; err != nil {
		t.Errorf("the first: %v", err)
	}
}

// TestSecondConnectionFromAnExhaustedPoolIsExplained has a handler use the database beside its transaction.
func TestSecondConnectionFromAnExhaustedPoolIsExplained(t *testing.T) {
	t.Parallel()
	s := openShop(t, "sqlite", sqliteDSN(t))
	db, err := sql.Open("sqlite", s.DSN)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	dedup := newDeduplicator(t, inbox.Config{Store: s.store, Consumer: "consumer"})
	h := middleware.Timeout(200 * time.Millisecond)(dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		db.SetMaxOpenConns(1)
		conn, err := db.Conn(msg.Context()) // the only one
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		_, err = db.ExecContext(msg.Context(), "SELECT 1") // and another
		return nil, err
	}))
	if _, err := h(message.NewMessage("id", nil)); !errors.Is(err, context.DeadlineExceeded) || dedup.ShouldPoison(err) {
		t.Errorf("error %v", err)
	}
	wantCounts(t, s, map[string]int{"SELECT count(*) FROM {inbox}": 0})
}

// TestClosingTheRouterLosesNothing closes the router while a handler runs, with and without a grace.
func TestClosingTheRouterLosesNothing(t *testing.T) {
	t.Parallel()
	for _, grace := range []time.Duration{0, 10 * time.Second} {
		t.Run(grace.String(), func(t *testing.T) {
			t.Parallel()
			s := openShop(t, "sqlite", sqliteDSN(t))
			dedup := newDeduplicator(t, inbox.Config{Store: s.store, ShutdownGrace: grace})
			poisoned := &collector{}
			poison, err := middleware.PoisonQueueWithFilter(poisoned, "poison", dedup.ShouldPoison)
			if err != nil {
				t.Fatal(err)
			}
			broker := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
			entered, leave := make(chan struct{}), make(chan struct{})
			run := func(handler message.NoPublishHandlerFunc) *message.Router {
				router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
				if err != nil {
					t.Fatal(err)
				}
				router.AddMiddleware(poison, middleware.Recoverer, dedup.Middleware)
				router.AddConsumerHandler("handler", "orders", broker, handler)
				go func() { _ = router.Run(context.Background()) }()
				<-router.Running()
				return router
			}
			router := run(func(msg *message.Message) error {
				close(entered)
				<-leave
				return s.takeFromStock(msg)
			})
			msg := message.NewMessage("id", []byte("id"))
			if err := broker.Publish("orders", msg); err != nil {
				t.Fatal(err)
			}
			<-entered
			closed := make(chan error)
			go func() { closed <- router.Close() }()
			if grace == 0 {
				waitFor(t, 10*time.Second, "the router to close", func() bool { // its handlers' contexts end at once
					select {
					case <-leave:
						return true
					default:
						close(leave)
						return false
					}
				})
			} else {
				close(leave)
			}
			if err := <-closed; err != nil {
				t.Error(err)
			}
			effects, err := s.count(t.Context(), "SELECT count(*) FROM {effects}")
			if err != nil {
				t.Fatal(err)
			}
			wantCounts(t, s, map[string]int{"SELECT count(*) FROM {inbox}": effects})
			if grace > 0 && effects != 1 {
				t.Error("not finished within the grace")
			}
			if poisoned.count() != 0 {
				t.Error("a healthy message was poisoned")
			}
			redelivered := message.NewMessage("id", []byte("id"))
			redelivered.SetContext(t.Context())
			consumer := newDeduplicator(t, inbox.Config{Store: s.store, Consumer: "handler"})
			if _, err := consumer.Middleware(func(msg *message.Message) ([]*message.Message, error) {
				return nil, s.takeFromStock(msg)
			})(redelivered); err != nil {
				t.Error(err)
			}
			wantCounts(t, s, map[string]int{"SELECT count(*) FROM {inbox}": 1, "SELECT count(*) FROM {effects}": 1})
		})
	}
}

func TestTwoHandlersOfOneMessageBothRun(t *testing.T) {
	t.Parallel()
	s := openShop(t, "sqlite", sqliteDSN(t))
	broker := newBroker()
	dedup := newDeduplicator(t, inbox.Config{Store: s.store})
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	router.AddMiddleware(dedup.Middleware)
	router.AddConsumerHandler("first", "orders", broker, s.takeFromStock)
	router.AddConsumerHandler("second", "orders", broker, s.book)
	start(t, router)
	for range 3 {
		if err := broker.Publish("orders", message.NewMessage("id", []byte("id"))); err != nil {
			t.Fatal(err)
		}
	}
	wantCounts(t, s, map[string]int{
		"SELECT count(*) FROM {effects}": 1, "SELECT count(*) FROM {ledger}": 1, "SELECT count(*) FROM {inbox}": 2,
	})
}

// TestWritesBesideTheTransactionAreNotCovered is the control: what a handler writes through the database itself survives
// the rollback.
func TestWritesBesideTheTransactionAreNotCovered(t *testing.T) {
	t.Parallel()
	s := openShop(t, "pgx", testenv.PostgreSQL(t))
	dedup := newDeduplicator(t, inbox.Config{Store: s.store, Consumer: "consumer"})
	attempts := 0
	h := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		attempts++
		err := errors.Join(
			s.exec(msg.Context(), "INSERT INTO {effects} VALUES ('in the transaction')"),
			s.exec(t.Context(), "INSERT INTO {effects} VALUES ('beside it')"),
		)
		if attempts == 1 {
			err = errScripted
		}
		return nil, err
	})
	for range 3 {
		_, _ = h(message.NewMessage("id", nil))
	}
	wantCounts(t, s, map[string]int{
		"SELECT count(*) FROM {effects} WHERE id = 'in the transaction'": 1,
		"SELECT count(*) FROM {effects} WHERE id = 'beside it'":          2,
	})
}
