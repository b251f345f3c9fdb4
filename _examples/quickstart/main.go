// Command quickstart shows what an inbox does. A stream of orders goes through a Watermill router. Some are delivered more
// than once, at the same time, and the handler fails and panics at random. It runs twice: without the inbox, and with it.
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"text/tabwriter"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"modernc.org/sqlite"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore"
)

const (
	orders = 500  // of one piece each
	stock  = 1000 // pieces at the start
)

// counters are what is shown of a run.
type counters struct {
	deliveries, runs, duplicates atomic.Int64
}

func main() {
	log.SetFlags(0)
	seed := flag.Uint64("seed", 1, "the same seed, the same misfortunes")
	flag.Parse()
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "\tdeliveries\thandler runs\tduplicates skipped\tstock expected\tstock found\t")
	exact := false
	for _, withInbox := range []bool{false, true} {
		name, verdict := "without the inbox", "wrong"
		if withInbox {
			name = "with the inbox"
		}
		var c counters
		found, err := run(withInbox, &c, misfortune{rand.New(rand.NewPCG(*seed, 0)), name})
		if err != nil {
			log.Fatal(err)
		}
		exact = found == stock-orders
		if exact {
			verdict = "exact"
		}
		fmt.Fprintf(table, "%s\t%d\t%d\t%d\t%d\t%d\t%s\n", name,
			c.deliveries.Load(), c.runs.Load(), c.duplicates.Load(), stock-orders, found, verdict)
	}
	_ = table.Flush()
	if !exact {
		log.Fatal("the run with the inbox is not exact")
	}
}

// run processes all orders on a new database, and returns what is left in stock.
func run(withInbox bool, c *counters, m misfortune) (found int, err error) {
	dir, err := os.MkdirTemp("", "inbox-quickstart-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	connector, err := sqlite.NewConnector("file:" + filepath.Join(dir, "shop.db") +
		"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)")
	if err != nil {
		return 0, err
	}
	db := sql.OpenDB(sqlstore.Guard(connector))
	defer db.Close()
	if _, err := db.Exec("CREATE TABLE stock AS SELECT ? AS pieces", stock); err != nil {
		return 0, err
	}

	store, err := sqlstore.New(db, sqlstore.Config{Dialect: sqlstore.SQLite})
	if err != nil {
		return 0, err
	}
	if err := store.InitializeSchema(context.Background()); err != nil {
		return 0, err
	}
	dedup, err := inbox.NewDeduplicator(inbox.Config{
		Store:       store,
		OnDuplicate: func(inbox.OnDuplicateParams) { c.duplicates.Add(1) },
	})
	if err != nil {
		return 0, err
	}

	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		return 0, err
	}
	router.AddMiddleware(count(&c.deliveries), middleware.Recoverer)
	if withInbox {
		router.AddMiddleware(dedup.Middleware) // the one line
	}
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	router.AddConsumerHandler("take_from_stock", "orders", broker, func(msg *message.Message) error {
		c.runs.Add(1)
		// The inbox's transaction if the message came through it, else the database itself.
		exec := store.Executor(msg.Context())
		if _, err := exec.ExecContext(msg.Context(), "UPDATE stock SET pieces = pieces - 1"); err != nil {
			return err
		}
		return m.strike()
	})
	go func() {
		if err := router.Run(context.Background()); err != nil {
			log.Print(err)
		}
	}()
	<-router.Running()

	if err := m.publish(broker); err != nil {
		return 0, err
	}
	if err := router.Close(); err != nil {
		return 0, err
	}
	return found, db.QueryRow("SELECT pieces FROM stock").Scan(&found)
}

// misfortune is what happens to a run. It is drawn one at a time, since a publish waits until the order is acknowledged.
type misfortune struct {
	*rand.Rand
	run string
}

// strike hits handlers after they did their work, where it hurts.
func (m misfortune) strike() error {
	switch m.IntN(10) {
	case 0:
		return errors.New("the handler failed")
	case 1:
		panic("the handler panicked")
	}
	return nil
}

// publish publishes every order, and some of them up to three times at once. What is not acknowledged is delivered again.
func (m misfortune) publish(broker message.Publisher) error {
	terminal := isTerminal()
	for i := range orders {
		copies := make(chan error, 1+m.IntN(3))
		for range cap(copies) {
			go func() {
				copies <- broker.Publish("orders", message.NewMessage("order-"+strconv.Itoa(i), []byte(`{"pieces": 1}`)))
			}()
		}
		for range cap(copies) {
			if err := <-copies; err != nil {
				return err
			}
		}
		if terminal {
			fmt.Printf("\r%s: %d of %d orders\033[K\r", m.run, i+1, orders)
		}
	}
	if terminal {
		fmt.Print("\033[K")
	}
	return nil
}

func isTerminal() bool {
	info, err := os.Stdout.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// count counts the deliveries.
func count(deliveries *atomic.Int64) message.HandlerMiddleware {
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			deliveries.Add(1)
			return h(msg)
		}
	}
}
