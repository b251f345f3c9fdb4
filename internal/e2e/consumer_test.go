package e2e_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/outbox"
)

// consumerVariable holds a consumer that this binary shall be, instead of a test.
const consumerVariable = "INBOX_E2E_CONSUMER"

func TestMain(m *testing.M) {
	text := os.Getenv(consumerVariable)
	if text == "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() { // it ends with the test, even if that is killed
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	var c consumer
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		log.Fatal(err)
	}
	if err := c.run(ctx); err != nil {
		log.Fatal(err)
	}
}

// consumer is a process with handlers of a shop.
type consumer struct {
	Shop     shop
	RabbitMQ string
	Quorum   bool // queues, instead of classic ones
	Handlers []string
	Outbox   bool // for the handlers' outputs, with a relay in the process

	// DieAt is where the process kills itself, unless the file Died is there, which it leaves.
	DieAt deathPoint
	Died  string
}

type deathPoint string

const (
	inHandler     deathPoint = "in the handler"
	beforePublish deathPoint = "between commit and publish"
	afterPublish  deathPoint = "between publish and ack"
)

func (c consumer) dieAt(point deathPoint) {
	if c.DieAt != point {
		return
	}
	file, err := os.OpenFile(c.Died, os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return // it died before
	}
	_ = file.Close()
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

func (c consumer) run(ctx context.Context) error {
	if err := c.Shop.open(context.Background()); err != nil {
		return err
	}
	defer c.Shop.close()
	config := inbox.Config{Store: c.Shop.store, ShutdownGrace: 5 * time.Second, Logger: watermill.NewStdLogger(false, false)}
	if c.Outbox {
		publisher, err := outbox.NewPublisher(c.Shop.outbox())
		if err != nil {
			return err
		}
		config.Outputs, config.Outbox = inbox.OutputsOutbox, publisher
		go c.relay(ctx)
	}
	dedup, err := inbox.NewDeduplicator(config)
	if err != nil {
		return err
	}
	// watermill-amqp hands out one message at a time per subscription, so it takes several routers to be quick.
	ended := make(chan error)
	const routers = 4
	for range routers {
		go func() { ended <- c.serve(ctx, dedup) }()
	}
	var errs []error
	for range routers {
		errs = append(errs, <-ended)
	}
	flush, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return errors.Join(append(errs, dedup.Close(flush))...)
}

func (c consumer) serve(ctx context.Context, dedup *inbox.Deduplicator) error {
	config := amqpConfig(c.RabbitMQ)
	if c.Quorum {
		config = quorumConfig(c.RabbitMQ)
	}
	subscriber, publisher, err := connect(config)
	for ; err != nil; subscriber, publisher, err = connect(config) {
		select { // the broker may be down for the moment
		case <-ctx.Done():
			return nil
		case <-time.After(100 * time.Millisecond):
		}
	}
	router, err := c.Shop.wire(dedup, subscriber, mortalPublisher{publisher, c}, c.Handlers...)
	if err != nil {
		return err
	}
	router.AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc { // inside of the inbox
		return func(msg *message.Message) ([]*message.Message, error) {
			outputs, err := h(msg)
			c.dieAt(inHandler)
			return outputs, err
		}
	})
	return router.Run(ctx)
}

// relay publishes what is in the outbox.
func (c consumer) relay(ctx context.Context) {
	publisher, err := amqp.NewPublisher(amqpConfig(c.RabbitMQ), watermill.NopLogger{})
	if err != nil {
		log.Fatal(err)
	}
	relay, err := outbox.NewRelay(outbox.RelayConfig{
		Config: c.Shop.outbox(), DB: c.Shop.db, Publisher: mortalPublisher{publisher, c}, BatchSize: 10,
		Logger: watermill.NewStdLogger(false, false),
	})
	if err != nil {
		log.Fatal(err)
	}
	_ = relay.Run(ctx) // nil always
}

func connect(config amqp.Config) (*amqp.Subscriber, *amqp.Publisher, error) {
	subscriber, err := amqp.NewSubscriber(config, watermill.NopLogger{})
	if err != nil {
		return nil, nil, err
	}
	publisher, err := amqp.NewPublisher(config, watermill.NopLogger{})
	if err != nil {
		_ = subscriber.Close()
		return nil, nil, err
	}
	return subscriber, publisher, nil
}

type mortalPublisher struct {
	message.Publisher
	consumer
}

func (p mortalPublisher) Publish(topic string, msgs ...*message.Message) error {
	p.dieAt(beforePublish)
	err := p.Publisher.Publish(topic, msgs...)
	p.dieAt(afterPublish)
	return err
}

// process is a consumer in a process of its own.
type process struct {
	t      *testing.T
	config string
	cmd    *exec.Cmd
	stdin  io.Closer
	output *os.File
}

func newProcess(t *testing.T, c consumer) *process {
	t.Helper()
	config, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	output, err := os.Create(filepath.Join(t.TempDir(), "output"))
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, config: string(config), output: output}
	t.Cleanup(func() {
		if p.cmd != nil && t.Failed() {
			_ = p.cmd.Process.Signal(syscall.SIGQUIT) // to see what it does
			_ = p.wait()
		}
		if p.cmd != nil {
			p.kill()
		}
		p.check()
		_ = output.Close()
	})
	return p
}

// race is the first frame of an access in a report of the race detector.
var race = regexp.MustCompile(`(?m)^ *(?:Previous )?(?:[Rr]ead|[Ww]rite|atomic \w+) at 0x.*\n *(\S+)`)

// check looks for data races of ours, and shows the output if the test failed.
func (p *process) check() {
	output, err := os.ReadFile(p.output.Name())
	if err != nil {
		p.t.Error(err)
	}
	for _, access := range race.FindAllSubmatch(output, -1) {
		if frame := string(access[1]); strings.HasPrefix(frame, "github.com/watermill-inbox/") {
			p.t.Errorf("data race in %s", frame)
		}
	}
	if p.t.Failed() {
		p.t.Logf("consumer:\n%s", output[max(0, len(output)-20_000):])
	}
}

func (p *process) start() {
	p.t.Helper()
	p.cmd = exec.Command(os.Args[0])
	// watermill-amqp has data races when it reconnects: they do not count.
	p.cmd.Env = append(os.Environ(), consumerVariable+"="+p.config, "GORACE=exitcode=0")
	p.cmd.Stdout, p.cmd.Stderr = p.output, p.output
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the test
	var err error
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		p.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
}

func (p *process) wait() error {
	err := p.cmd.Wait()
	p.cmd = nil
	return err
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.wait()
}

// wantSuicide waits until the process killed itself.
func (p *process) wantSuicide() {
	p.t.Helper()
	if err := p.wait(); !endedBy(err, syscall.SIGKILL) {
		p.t.Fatalf("consumer ended with %v", err)
	}
}

// terminate ends the process as a deployment does, and checks that it ends well.
func (p *process) terminate() {
	p.t.Helper()
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	if err := p.wait(); err != nil && !endedBy(err, syscall.SIGTERM) { // the latter if it had not begun yet
		p.t.Errorf("consumer: %v", err)
	}
}

func endedBy(err error, signal syscall.Signal) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == signal
}
