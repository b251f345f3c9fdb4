// Package e2e tests the inbox with real brokers, real databases and real kills. Its tests start consumers as processes of
// their own, which are this test's binary.
package e2e_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	_ "github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/outbox"
	"github.com/watermill-inbox/inbox/sqlstore"
	"github.com/watermill-inbox/inbox/sqlstore/pgxstore"
)

// shop is a database with the tables of the handlers, whose names begin with Prefix.
type shop struct {
	Store    string // a key of databases
	DSN      string
	Prefix   string
	MaxConns int // of its pool; 0: the driver's default

	store  inbox.Store
	exec   func(ctx context.Context, query string) error // in the transaction that ctx carries, or without
	beside func(ctx context.Context, query string) error // not in the transaction
	count  func(ctx context.Context, query string) (int, error)
	inUse  func() int // connections
	setup  func(context.Context) error
	db     watermillsql.Beginner // of the outbox
	close  func()
}

// databases are the stores of the tests, and where their database is.
var databases = map[string]func(*testing.T) string{
	"pgx":    func(t *testing.T) string { return testenv.PostgreSQL(t) },
	"stdlib": func(t *testing.T) string { return testenv.PostgreSQL(t) },
	"mysql":  func(t *testing.T) string { return testenv.MariaDB(t) + "&maxAllowedPacket=0" },
	"sqlite": func(t *testing.T) string {
		return "file:" + filepath.Join(t.TempDir(), "shop.db") +
			"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_pragma=synchronous(NORMAL)"
	},
}

// newShop returns a shop with tables of the test's own.
func newShop(t *testing.T, store string) *shop {
	t.Helper()
	return openShop(t, store, databases[store](t))
}

func openShop(t *testing.T, store, dsn string) *shop {
	t.Helper()
	s := &shop{Store: store, DSN: dsn, Prefix: "e2e_" + strings.ToLower(watermill.NewULID()) + "_"}
	if err := s.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if store != "sqlite" { // its file goes with the test's folder
			if err := s.exec(context.Background(), "DROP TABLE IF EXISTS {inbox}, {effects}, {payments}, {ledger}, {stock}, watermill_{outbox}"); err != nil {
				t.Error(err)
			}
		}
		s.close()
	})
	if err := s.create(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// another returns the same shop over a pool of its own, as another process has it.
func (s *shop) another(t *testing.T, maxConns int) *shop {
	t.Helper()
	other := &shop{Store: s.Store, DSN: s.DSN, Prefix: s.Prefix, MaxConns: maxConns}
	if err := other.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(other.close)
	return other
}

// open connects to the database.
func (s *shop) open(ctx context.Context) error {
	switch s.Store {
	case "pgx":
		return s.openPgx(ctx)
	case "stdlib":
		return s.openSQL("pgx", sqlstore.PostgreSQL)
	case "mysql":
		return s.openSQL("mysql", sqlstore.MySQL)
	case "sqlite":
		return s.openSQL("sqlite", sqlstore.SQLite)
	default:
		return fmt.Errorf("no store %q", s.Store)
	}
}

func (s *shop) openPgx(ctx context.Context) error {
	config, err := pgxpool.ParseConfig(s.DSN)
	if err != nil {
		return err
	}
	if s.MaxConns > 0 {
		config.MaxConns = int32(s.MaxConns)
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	store, err := pgxstore.New(pool, pgxstore.Config{Table: s.Prefix + "inbox"})
	if err != nil {
		return err
	}
	s.store, s.setup, s.close = store, store.InitializeSchema, pool.Close
	s.exec = func(ctx context.Context, query string) error {
		_, err := store.Executor(ctx).Exec(ctx, s.named(query))
		return err
	}
	s.beside = func(ctx context.Context, query string) error {
		_, err := pool.Exec(ctx, s.named(query))
		return err
	}
	s.count = func(ctx context.Context, query string) (n int, err error) {
		return n, pool.QueryRow(ctx, s.named(query)).Scan(&n)
	}
	s.inUse = func() int { return int(pool.Stat().AcquiredConns()) }
	s.db = watermillsql.BeginnerFromPgx(pool)
	return nil
}

func (s *shop) openSQL(driver string, dialect sqlstore.Dialect) error {
	db, err := sql.Open(driver, s.DSN)
	if err != nil {
		return err
	}
	db.SetMaxOpenConns(s.MaxConns)
	store, err := sqlstore.New(db, sqlstore.Config{Dialect: dialect, Table: s.Prefix + "inbox"})
	if err != nil {
		return err
	}
	s.store, s.setup, s.close = store, store.InitializeSchema, func() { _ = db.Close() }
	s.exec = func(ctx context.Context, query string) error {
		_, err := store.Executor(ctx).ExecContext(ctx, s.named(query))
		return err
	}
	s.beside = func(ctx context.Context, query string) error {
		_, err := db.ExecContext(ctx, s.named(query))
		return err
	}
	s.count = func(ctx context.Context, query string) (n int, err error) {
		return n, db.QueryRowContext(ctx, s.named(query)).Scan(&n)
	}
	s.inUse = func() int { return db.Stats().InUse }
	s.db = watermillsql.BeginnerFromStdSQL(db)
	return nil
}

// named puts the prefix before the tables of a query, which are written as {name}.
func (s *shop) named(query string) string {
	return strings.NewReplacer("{", s.Prefix, "}", "").Replace(query)
}

// create creates the tables.
func (s *shop) create(ctx context.Context) error {
	errs := []error{s.setup(ctx)}
	for _, table := range []string{"effects", "payments", "ledger"} {
		errs = append(errs, s.exec(ctx, "CREATE TABLE {"+table+"} (id VARCHAR(100))"))
	}
	return errors.Join(append(errs,
		s.exec(ctx, "CREATE TABLE {stock} (pieces INTEGER)"), s.exec(ctx, "INSERT INTO {stock} VALUES (0)"))...)
}

// takeFromStock is the handler of the tests, on every broker and every database.
func (s *shop) takeFromStock(msg *message.Message) error {
	return errors.Join(
		s.exec(msg.Context(), "INSERT INTO {effects} VALUES ('"+string(msg.Payload)+"')"),
		s.exec(msg.Context(), "UPDATE {stock} SET pieces = pieces - 1"),
	)
}

// outbox is where the outbox of the shop is.
func (s *shop) outbox() outbox.Config {
	config := outbox.Config{Dialect: sqlstore.PostgreSQL, Topic: s.Prefix + "outbox"}
	if s.Store == "mysql" {
		config.Dialect = sqlstore.MySQL
	}
	return config
}

func (s *shop) createOutbox(t *testing.T) {
	t.Helper()
	if err := outbox.InitializeSchema(t.Context(), s.db, s.outbox()); err != nil {
		t.Fatal(err)
	}
}

// pay and book are the stages of a pipeline.
func (s *shop) pay(msg *message.Message) ([]*message.Message, error) {
	if err := s.exec(msg.Context(), "INSERT INTO {payments} VALUES ('"+string(msg.Payload)+"')"); err != nil {
		return nil, err
	}
	return []*message.Message{message.NewMessage(watermill.NewUUID(), msg.Payload)}, nil
}

func (s *shop) book(msg *message.Message) error {
	return s.exec(msg.Context(), "INSERT INTO {ledger} VALUES ('"+string(msg.Payload)+"')")
}

// wire is the wiring of the tests, on every broker and every database: the recommended stack, with the handlers. Topics
// have the shop's prefix.
func (s *shop) wire(
	dedup *inbox.Deduplicator, subscriber message.Subscriber, publisher message.Publisher, handlers ...string,
) (*message.Router, error) {
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NewStdLogger(false, false))
	if err != nil {
		return nil, err
	}
	poison, err := middleware.PoisonQueueWithFilter(publisher, s.Prefix+"poison", dedup.ShouldPoison)
	if err != nil {
		return nil, err
	}
	retry := middleware.Retry{MaxRetries: 5, InitialInterval: 50 * time.Millisecond, ResetContextOnRetry: true}
	router.AddMiddleware(poison, keepContext, retry.Middleware, middleware.Timeout(20*time.Second), middleware.Recoverer, dedup.Middleware)
	for _, handler := range handlers {
		switch handler {
		case "take_from_stock":
			router.AddConsumerHandler(handler, s.Prefix+"orders", subscriber, s.takeFromStock)
		case "pay":
			router.AddHandler(handler, s.Prefix+"orders", subscriber, s.Prefix+"payments", publisher, s.pay)
		case "book":
			router.AddConsumerHandler(handler, s.Prefix+"payments", subscriber, s.book)
		default:
			return nil, fmt.Errorf("no handler %q", handler)
		}
	}
	return router, nil
}

// keepContext gives the message its context back. Timeout leaves an ended one on it.
func keepContext(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		defer func() { msg.SetContext(ctx) }()
		return h(msg)
	}
}

// queues are the topics of the wiring.
func (s *shop) queues() []string {
	return []string{s.Prefix + "orders", s.Prefix + "payments", s.Prefix + "poison"}
}

// mustCount returns the result of a query.
func (s *shop) mustCount(t *testing.T, query string) int {
	t.Helper()
	n, err := s.count(t.Context(), query)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// wantCounts checks what is in the database.
func wantCounts(t *testing.T, s *shop, want map[string]int) {
	t.Helper()
	for query, n := range want {
		if got := s.mustCount(t, query); got != n {
			t.Errorf("%s: %d, want %d", query, got, n)
		}
	}
}

// ample is how long anything may take on a busy machine.
const ample = 2 * time.Minute

// The inbox's rows, those with outputs that are not known to be published, the outbox's rows, and the handlers' effects.
const (
	allRows         = "SELECT count(*) FROM {inbox}"
	unpublished     = "SELECT count(*) FROM {inbox} WHERE outputs IS NOT NULL"
	inOutbox        = "SELECT count(*) FROM watermill_{outbox}"
	taken           = "SELECT -pieces FROM {stock}"
	allEffects      = "SELECT count(*) FROM {effects}"
	effectsOfOrders = "SELECT count(DISTINCT id) FROM {effects}"
	allPayments     = "SELECT count(*) FROM {payments}"
	allBookings     = "SELECT count(*) FROM {ledger}"
	paidOrders      = "SELECT count(DISTINCT id) FROM {payments}"
	bookedOrders    = "SELECT count(DISTINCT id) FROM {ledger}"
)

// orders returns the messages of the orders from first to end, each as often as copies says, in random order.
func orders(random *rand.Rand, first, end int, copies func(order int) int) []*message.Message {
	var msgs []*message.Message
	for i := first; i < end; i++ {
		id := "order-" + strconv.Itoa(i)
		for range copies(i) {
			msgs = append(msgs, message.NewMessage(id, []byte(id)))
		}
	}
	random.Shuffle(len(msgs), func(i, j int) { msgs[i], msgs[j] = msgs[j], msgs[i] })
	return msgs
}

// waitFor polls until done reports true.
func waitFor(t *testing.T, timeout time.Duration, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(timeout); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s", what, timeout)
		}
	}
}

// receive waits for a value.
func receive[T any](t *testing.T, what string, from <-chan T) T {
	t.Helper()
	select {
	case value := <-from:
		return value
	case <-time.After(ample):
		t.Fatalf("%s: not within %s", what, ample)
		panic("unreachable")
	}
}

// seeded returns a source of random numbers whose seed is in the log.
func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := setting(t, "INBOX_TEST_SEED", rand.Uint64(), func(text string) (uint64, error) {
		return strconv.ParseUint(text, 10, 64)
	})
	t.Logf("INBOX_TEST_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// setting returns the value of an environment variable.
func setting[T any](t *testing.T, variable string, otherwise T, parse func(string) (T, error)) T {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	value, err := parse(text)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return value
}
